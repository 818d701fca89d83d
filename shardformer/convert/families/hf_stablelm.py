"""StableLM: `StableLmForCausalLM`. Layer norms with offsets, and heads that rotate partly."""

from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import (
    GATED_ACTIVATIONS,
    HIDDEN_NAMES,
    ROPE_KEYS,
    Family,
    read_activation,
    read_partial_rotary,
    write_partial_rotary,
)
from shardformer.convert.families.hf_llama import LLAMA, list_projections
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.layout import Stored, norm

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "use_qkv_bias": False, "use_parallel_residual": False,
    "partial_rotary_factor": 0.25, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    heads = theirs["num_attention_heads"]
    return read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | read_partial_rotary(theirs) | {
        "block": "parallel" if theirs["use_parallel_residual"] else "sequential",
        "bias": "qkv_norm" if theirs["use_qkv_bias"] else "norm",
        "kv_heads": theirs["num_key_value_heads"] or heads,
    }  # fmt: skip


def _write(c: Config) -> dict:
    return write_partial_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "use_parallel_residual": c.model.block == "parallel",
        "use_qkv_bias": c.model.bias == "qkv_norm",
        "hidden_act": "silu",
    }


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    norms = norm(f"{at}.input_layernorm", "norm" if c.model.block == "parallel" else "attention_norm", c)
    if c.model.block == "sequential":
        norms += norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c)
    return [*norms, *list_projections(c), *(list_qkv_biases(c) if c.model.bias == "qkv_norm" else [])]


STABLELM = Family(
    architecture="StableLmForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"},
    defaults=DEFAULTS,
    fixed={"qk_layernorm": (False,)},
    ours={"norm": "layernorm", "embed": "plain", "positions": "rotary"},
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", "use_qkv_bias", "use_parallel_residual", *ROPE_KEYS),
    outside=LLAMA.outside,
    layer=_layer,
    dropouts=("attention_dropout", "hidden_dropout"),
    variants=lambda c: {
        "activation": ("swiglu",),
        "block": ("parallel", "sequential"),
        "bias": ("norm", "qkv_norm"),
        "rotary_dims": None,
        "rotary_scaling": None,
        "rotary_theta": None,
        "kv_heads": None,
    },
)
