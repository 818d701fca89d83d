"""GLM-4: `GlmForCausalLM`. Llama with joined gate and up, biases on q, k and v, and partly rotating heads."""

import dataclasses

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.family import (
    GATED_ACTIVATIONS,
    read_activation,
    read_partial_rotary,
    write_partial_rotary,
)
from shardformer.convert.families.hf_llama import LLAMA, list_projections, read_head_size
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.layout import Part, Stored, neighbours, norm

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 151_552, "intermediate_size": 13_696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 0.00000015625, "attention_bias": True,
    "partial_rotary_factor": 0.5, "bos_token_id": None, "eos_token_id": [151_329, 151_336, 151_338],
    "pad_token_id": 151_329,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    return read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | read_head_size(theirs) | {
        "kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"],
        "bias": "qkv" if theirs["attention_bias"] else "none",
    } | read_partial_rotary(theirs)  # fmt: skip


def _write(c: Config) -> dict:
    return write_partial_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "head_dim": c.model.head_size,
        "hidden_act": "silu",
        "attention_bias": c.model.bias == "qkv",
    }


def list_joined_projections(c: Config) -> list[Stored]:
    """Lists the matrices of a layer, and the biases of its queries, keys and values."""
    D, F = c.model.d_model, c.model.ff_size
    gate_and_up = tuple(Part(name, np.transpose, (i,)) for i, name in enumerate(("gate", "up")))
    return [
        *(stored for stored in list_projections(c, neighbours) if stored.parts[0].ours not in ("gate", "up")),
        Stored("model.layers.{}.mlp.gate_up_proj.weight", (2 * F, D), gate_and_up, seen=(2, F, D)),
        *(list_qkv_biases(c, neighbours) if c.model.bias == "qkv" else []),
    ]


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        *list_joined_projections(c),
    ]


GLM = dataclasses.replace(
    LLAMA,
    architecture="GlmForCausalLM",
    defaults=DEFAULTS,
    fixed={},
    read=_read,
    write=_write,
    layer=_layer,
    silent=(),
    harmless=(),
    variants=lambda c: LLAMA.variants(c) | {"rotary_dims": None, "bias": ("none", "qkv")},
)
