"""Train steps and their bytes by the TPU's compiler. To compile them again, with libtpu, which takes minutes each:

    python -m tests.analysis.tpu_bytes [NAME ...]

Bytes are arguments and temporaries of one device by libtpu 0.0.52 and jax 0.10.2.
"""

import sys
from typing import NamedTuple

from shardformer.analysis import compiling, plan
from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.devices import chips

GPT = Config.of(
    block="sequential", positions="learned", bias="none", tied=True, vocab=50_304, seq=1024, dtype="bfloat16"
)
GPT_125M = GPT.replace(layers=12, d_model=768, heads=12)
GPT_350M = GPT.replace(layers=24, d_model=1024, heads=16)
GPT_760M = GPT.replace(layers=24, d_model=1536, heads=12)
GPT_1_3B = GPT.replace(layers=24, d_model=2048, heads=32, seq=2048)
GPT_2_7B = GPT.replace(layers=32, d_model=2560, heads=40, seq=2048)
NEOX_20B = GPT.replace(
    layers=44, d_model=6144, heads=64, seq=2048, vocab=50_432, tied=False, bias="all", positions="rotary",
    block="parallel_two_norms",
)  # fmt: skip
LLAMA = Config.of(block="sequential", norm="rmsnorm", bias="none", activation="swiglu", seq=2048, dtype="bfloat16")
LLAMA_7B = LLAMA.replace(layers=32, d_model=4096, heads=32, d_ff=11_008, vocab=32_000)
LLAMA_13B = LLAMA.replace(layers=40, d_model=5120, heads=40, d_ff=13_824, vocab=32_000)
LLAMA_3_8B = LLAMA.replace(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14_336, vocab=128_256)
QWEN = LLAMA.replace(layers=28, bias="qkv")
QWEN_1_5B = QWEN.replace(d_model=1536, heads=12, kv_heads=2, d_ff=8960, vocab=151_936, tied=True)
QWEN_7B = QWEN.replace(d_model=3584, heads=28, kv_heads=4, d_ff=18_944, vocab=152_064)
GEMMA_2_9B = LLAMA.replace(
    layers=42, d_model=3584, heads=16, kv_heads=8, head_dim=256, d_ff=14_336, vocab=256_000, tied=True,
    activation="geglu", norm="rmsnorm_plus_one", embed_scale=None, block="sequential_four_norms",
    attention_scale=0.0625, attention_cap=50.0, logits_cap=30.0, window=4096, window_pattern="wf",
)  # fmt: skip
MIXTRAL_8X7B = LLAMA.replace(
    layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14_336, vocab=32_000, seq=4096, experts=8, experts_per_token=2
)
QWEN_3_30B_A3B = LLAMA.replace(
    layers=48, d_model=2048, heads=32, kv_heads=4, head_dim=128, qk_norm="head", vocab=151_936, seq=4096, d_ff=6144,
    experts=128, experts_per_token=8, expert_width=768,
)  # fmt: skip
GPTJ = preset("gptj_6b")
EXCHANGING = {"zero": 3, "remat": "dots", "grad_dtype": "bfloat16"}
FULL = {"mesh": "16x1", "batch": 16, "zero": 3, "remat": "full"}


class Case(NamedTuple):
    """A step on a slice."""

    chip: str
    config: Config
    compiled: float  # GB
    is_fitted: bool = False  # a rule of the estimate was found by looking at its program

    def estimate(self) -> plan.Plan:
        return plan.estimate(self.config, chips.parse_slice(self.chip))


def in_small_chunks(config: Config) -> Config:
    """Returns a config whose loss takes 64 MiB of logits at once, as all devices did when it was first compiled."""
    return config.replace(loss_chunk=2**26 // (4 * config.model.padded_vocab // config.parallel.mp))


CASES = {
    "125M": Case("v5e:2x2", GPT_125M.replace(mesh="4x1", batch=32), 7.475, True),
    "125M full": Case("v4:2x2x1", GPT_125M.replace(mesh="4x1", batch=64, remat="full"), 3.245, True),
    "1.3B": Case("v5e:4x4", GPT_1_3B.replace(mesh="16x1", batch=32, **EXCHANGING), 7.077, True),
    "gptj_6b": Case("v5e:4x4", GPTJ.replace(mesh="16x1"), 12.225, True),
    "Llama-3-8B": Case("v5e:4x4", LLAMA_3_8B.replace(**FULL), 13.449, True),
    "20B": Case("v4:2x4x4", NEOX_20B.replace(mesh="32x1", batch=32, zero=3, remat="full"), 16.850, True),
    "350M": Case("v6e:2x2", GPT_350M.replace(mesh="4x1", batch=32, remat="dots"), 11.128),
    "350M zero": Case("v6e:2x2", GPT_350M.replace(mesh="4x1", batch=32, zero=1), 15.360),
    "760M": Case("v5p:2x2x1", GPT_760M.replace(mesh="4x1", batch=64, zero=1), 38.893),
    "760M zero": Case("v5e:2x4", GPT_760M.replace(mesh="8x1", batch=32, zero=3, remat="dots"), 5.663),
    "1.5B mp": Case("v5e:2x4", QWEN_1_5B.replace(mesh="4x2", batch=8, zero=1, remat="dots"), 8.850),
    "2.7B mp": Case("v4:2x2x4", GPT_2_7B.replace(mesh="8x2", batch=32, zero=1, remat="dots"), 16.509),
    "7B": Case("v5e:4x4", LLAMA_7B.replace(mesh="16x1", batch=16, **EXCHANGING), 14.225),
    "13B mp": Case("v5p:2x2x4", LLAMA_13B.replace(mesh="4x4", batch=32, zero=1, remat="full"), 30.917),
    "20B mp": Case("v5p:2x4x4", NEOX_20B.replace(mesh="8x4", batch=32, zero=1, remat="full"), 33.087),
    "Llama-3-8B v6e": Case("v6e:4x4", LLAMA_3_8B.replace(**FULL), 13.447, True),
    "Llama-3-8B v5p": Case("v5p:2x2x4", LLAMA_3_8B.replace(**FULL), 13.459),
    "Gemma-2-9B v6e": Case("v6e:4x4", GEMMA_2_9B.replace(**FULL), 16.656),
    "Gemma-2-9B v5p": Case("v5p:2x2x4", GEMMA_2_9B.replace(**FULL), 16.691),
    "Qwen2.5-7B v6e": Case("v6e:4x4", QWEN_7B.replace(**FULL), 12.979),
    "Qwen2.5-7B v5p": Case("v5p:2x2x4", QWEN_7B.replace(**FULL), 12.975),
    "Mixtral-8x7B": Case("v5p:4x4x4", MIXTRAL_8X7B.replace(**FULL | {"mesh": "64x1", "batch": 256}), 28.93, True),
    "Qwen3-30B-A3B": Case("v5e:8x8", QWEN_3_30B_A3B.replace(**FULL | {"mesh": "64x1", "batch": 64}), 12.86),
    "gptj_6b bf16 v5e": Case("v5e:4x4", GPTJ.replace(mesh="16x1", grad_dtype="bfloat16"), 11.672),
    "gptj_6b bf16 v4": Case("v4:2x2x4", GPTJ.replace(mesh="16x1", grad_dtype="bfloat16"), 11.681),
    "gptj_6b bf16 v5p": Case("v5p:4x4x4", GPTJ.replace(mesh="64x1", batch=64, grad_dtype="bfloat16"), 7.638),
    "gptj_6b v4 dp": Case("v4:2x2x2", in_small_chunks(GPTJ.replace(mesh="8x1")), 23.813),
    "gptj_6b v4 mp": Case("v4:2x2x2", in_small_chunks(GPTJ.replace(mesh="1x8", zero=0, remat="full")), 22.261),
    "gptj_6b v5e dp": Case("v5e:4x4", in_small_chunks(GPTJ.replace(mesh="16x1")), 13.009),
    "gptj_6b v5e mp": Case("v5e:4x4", in_small_chunks(GPTJ.replace(mesh="4x4", remat="full")), 9.317),
    "gptj_6b v5e zero=1": Case("v5e:4x4", in_small_chunks(GPTJ.replace(mesh="2x8", zero=1, remat="full")), 11.983),
    "gptj_6b v5p mp": Case("v5p:4x4x4", in_small_chunks(GPTJ.replace(mesh="16x4", batch=64, remat="full")), 4.274),
}


def main(names: list[str]) -> None:
    for name in names or CASES:
        case = CASES[name]
        compiled = plan.compile_plan(case.estimate(), "libtpu").compiled
        assert compiled
        off = case.estimate().estimate / compiled.bytes - 1 if compiled.bytes else 0.0
        words = compiled.refused or f"{compiled.bytes / 1e9:.3f} GB in {compiled.seconds:.0f} s, estimate {off:+.1%}"
        print(f"{name}: {words}; recorded {case.compiled} GB", flush=True)


if __name__ == "__main__":
    compiling.has_libtpu() or sys.exit("needs libtpu: pip install 'shardformer[aot]'")
    main(sys.argv[1:])
