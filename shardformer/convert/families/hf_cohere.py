"""Command R and Aya 23: `CohereForCausalLM`. One norm for both branches, and a factor on the output logits."""

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, LAYERNORM, Family
from shardformer.convert.families.hf_llama import LLAMA, list_outside, read_settings, write_settings
from shardformer.convert.families.layout import Stored, linear, norm
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0,
    "tie_word_embeddings": True, "bos_token_id": 5, "eos_token_id": 255_001, "pad_token_id": 0,
}  # fmt: skip


def read(theirs: dict) -> dict:
    scale = theirs["logit_scale"]
    if type(scale) not in (int, float) or not scale > 0:
        raise UsageError(f"logit_scale={scale!r:.80} is not computed here; expected a number above 0")
    return read_settings(theirs) | {"logits_scale": float(scale)}


def write(c: Config) -> dict:
    return write_settings(c) | {"logit_scale": c.model.logits_scale}


def list_layer(c: Config) -> list[Stored]:
    """Lists the arrays of a layer; its rotary pairs are neighbours, as ours are."""
    D, F, H, G, K = c.model.d_model, c.model.ff_size, c.model.heads, c.model.key_value_heads, c.model.head_size
    at = "model.layers.{}"
    return [
        *norm(f"{at}.input_layernorm", "norm", c),
        *(linear(f"{at}.self_attn.{name}_proj", name, heads * K, D) for name, heads in (("q", H), ("k", G), ("v", G))),
        linear(f"{at}.self_attn.o_proj", "o", D, H * K),
        *(linear(f"{at}.mlp.{name}_proj", name, F, D) for name in ("gate", "up")),
        linear(f"{at}.mlp.down_proj", "down", D, F),
    ]


COHERE = Family(
    architecture="CohereForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"},
    defaults=DEFAULTS,
    fixed={"attention_bias": (False,), "use_qk_norm": (False,)},
    ours=LAYERNORM | {"block": "parallel", "bias": "none", "positions": "rotary"},
    read=read,
    write=write,
    also=(*LLAMA.also, "logit_scale"),
    outside=list_outside,
    layer=list_layer,
    dropouts=("attention_dropout",),
    silent=("pretraining_tp",),
    harmless=("model_max_length",),
    variants=lambda c: LLAMA.variants(c) | {"logits_scale": None},
)
