"""Named configurations. A comment gives the reason for a value that differs from the default."""

from shardformer.config.config import Config
from shardformer.config.parsing import suggest_closest
from shardformer.errors import UsageError


def tiny() -> Config:
    """Returns a model that compiles in seconds; its 8 heads fit every mesh of 8 devices."""
    return Config.of(layers=2, d_model=32, heads=8, seq=16, batch=8, steps=40, warmup=4, data="builtin",
                  log_every=1, eval_every=20, eval_batches=4, save_every=20)  # fmt: skip


def shakespeare_cpu() -> Config:
    """Returns nanoGPT's CPU setting: 0.80M parameters, 2,000 iterations of 12 x 64 characters.

    Tuned on tiny_shakespeare, in nats/char on validation + test: nanoGPT's lr=1e-3 lr_min=1e-4 init_std=0.02 gives
    about 1.9, lr=3e-3 lr_min=0 gives 1.79, and init_std=fan_in in addition 1.71. lr=6e-3 and beta2=0.95 are each
    slightly worse.
    """
    return Config.of(
        layers=4, d_model=128, heads=4, seq=64, batch=12, steps=2000,
        block="sequential", positions="learned", bias="none", tied=True,
        lr=3e-3, lr_min=0.0,  # 2,000 steps are few: a high rate that decays to zero
        init_std=None,  # 1 / sqrt(fan in) is 0.09 at this width; with 0.02, attention learns nothing for 300 steps
        scan=False,  # four layers compile quickly, and a CPU runs them faster unrolled
    )  # fmt: skip


def shakespeare_char() -> Config:
    """Returns nanoGPT's 10.65M setting, with 8 heads instead of 6, so that mp=8 divides them."""
    return Config.of(
        layers=6, d_model=384, heads=8, seq=256, batch=64, steps=5000,
        block="sequential", positions="learned", bias="none", tied=True,
        dropout=0.2,  # a million characters are few for 10.65M parameters
        dtype="bfloat16",
    )  # fmt: skip


def gpt1() -> Config:
    """Returns the configuration of the notebook that this project grew from, with its batch of 1024 x 32."""
    return Config.of(
        layers=12, d_model=768, heads=12, seq=32, batch=1024, vocab=5000, steps=5000,
        positions="learned", dtype="bfloat16", remat="full", lr=3e-4, lr_min=3e-5,
    )  # fmt: skip


def gptj_6b() -> Config:
    """Returns GPT-J-6B: parallel block, rotary on 64 of 256 dimensions, untied head with a bias."""
    return Config.of(
        layers=28, d_model=4096, heads=16, seq=2048, batch=16, vocab=50400, steps=350_000, rotary_dims=64,
        embed="bias",
        zero=3, remat="dots",  # the TPU compiler's fewest cycles among the settings that fit (analysis/README.md)
        dtype="bfloat16", lr=1.2e-4, lr_min=1.2e-5, warmup=3000, beta2=0.95, z_loss=1e-4,
        eval_every=500, save_every=500,
        eval_batches=50,  # 3% of the time of 500 steps; 5% of a large text would take longer than the steps
    )  # fmt: skip


def gptj_6b_finetune() -> Config:
    """Returns GPT-J-6B for training all weights on 8 chips of 16 GB or 4 of 32 GB: 10 bytes a parameter, not 12."""
    return gptj_6b().replace(
        steps=1000, lr=5e-6, lr_min=5e-7, warmup=50, beta2=0.999, weight_decay=0.0, eval_every=100, save_every=200,
        batch=8, remat="full",
        param_dtype="bfloat16", moment_dtype="bfloat16",  # bytes a parameter: 2 + 4 (the master) + 2 x 2 (the moments)
        z_loss=0.0,  # a trained model's logits need no regularisation
    )  # fmt: skip


def gpt2() -> Config:
    """Returns GPT-2 of 124M parameters as build-nanogpt trains it: 10 billion tokens, batches of half a million."""
    return Config.of(
        layers=12, d_model=768, heads=12, seq=1024, batch=512, vocab=50257, steps=19_073,
        block="sequential", positions="learned", bias="all", head_bias=False, tied=True,
        vocab_multiple=128,  # a TPU multiplies tiles of 128 columns
        dtype="bfloat16", lr=6e-4, lr_min=6e-5, warmup=715, beta2=0.95,
    )  # fmt: skip


def gpt2_medium() -> Config:
    """Returns GPT-2 of 355M parameters; a larger model takes a lower rate (table 2.1 of GPT-3's paper)."""
    return gpt2().replace(layers=24, d_model=1024, heads=16, lr=3e-4, lr_min=3e-5)


def gpt2_large() -> Config:
    """Returns GPT-2 of 774M parameters."""
    return gpt2().replace(layers=36, d_model=1280, heads=20, lr=2.5e-4, lr_min=2.5e-5)


def gpt2_xl() -> Config:
    """Returns GPT-2 of 1.56B parameters."""
    return gpt2().replace(layers=48, d_model=1600, heads=25, lr=2e-4, lr_min=2e-5)


def _llama() -> Config:
    return Config.of(
        block="sequential", norm="rmsnorm", bias="none", activation="swiglu", dtype="bfloat16", beta2=0.95, warmup=2000,
        eval_every=500, eval_batches=50, save_every=500,
    )  # fmt: skip


def llama3_8b() -> Config:
    """Returns Llama 3 8B with 20 tokens a parameter in batches of 4 million; its authors took 1,900 a parameter."""
    return _llama().replace(
        layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14_336, seq=8192, batch=512, vocab=128_256, steps=40_000,
        rotary_theta=500_000.0, lr=3e-4, lr_min=3e-5, zero=3, remat="full",
    )  # fmt: skip


def qwen3_0_6b() -> Config:
    """Returns Qwen3 0.6B with rows of its first stage, 4,096 tokens; it was stretched to 40,960 later."""
    return _llama().replace(
        layers=28, d_model=1024, heads=16, kv_heads=8, head_dim=128, d_ff=3072, seq=4096, batch=256, vocab=151_936,
        steps=12_000, qk_norm="head", norm_eps=1e-6, rotary_theta=1e6, tied=True, lr=6e-4, lr_min=6e-5, remat="dots",
    )  # fmt: skip


def smollm2_135m() -> Config:
    """Returns SmolLM2 135M with its authors' peak rate; 2.6 billion tokens in place of their 2 trillion."""
    return _llama().replace(
        layers=30, d_model=576, heads=9, kv_heads=3, d_ff=1536, seq=2048, batch=256, vocab=49_152, steps=5000,
        warmup=500, rotary_theta=100_000.0, tied=True, lr=3e-3, lr_min=0.0,
        init_std=0.0417,  # theirs: 1 / sqrt(576)
    )  # fmt: skip


def finetune() -> Config:
    """Returns the settings of `train base=FOLDER`, which reads the model's keys from the folder.

    They are a tenth of the usual rate, few steps and no weight decay, as the weights are trained already.
    """
    return Config.of(batch=16, steps=1000, lr=2e-5, lr_min=2e-6, warmup=50, beta2=0.999, weight_decay=0.0,
                  eval_every=100, save_every=200)  # fmt: skip


PRESETS = {
    preset.__name__: preset
    for preset in (
        tiny, shakespeare_cpu, shakespeare_char, smollm2_135m, gpt2, gpt2_medium, gpt2_large, gpt2_xl, qwen3_0_6b,
        llama3_8b, gpt1, gptj_6b, gptj_6b_finetune,
    )
}  # fmt: skip


def preset(name: str, **given) -> Config:
    """Returns a preset with the keys that are given; rejects a given key that has no effect.

    >>> from shardformer import preset
    >>> preset("tiny", mesh="4x2", zero=3).parallel.dp
    4
    >>> preset("tinny")
    Traceback (most recent call last):
    shardformer.errors.UsageError: unknown preset 'tinny'; did you mean 'tiny'?...
    """
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}{suggest_closest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    config = PRESETS[name]()
    return config.replace(out=f"checkpoints/{name}").override(given)
