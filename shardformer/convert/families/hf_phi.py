"""Phi-1, Phi-1.5 and Phi-2: `PhiForCausalLM`. One norm for both branches, partly rotating heads, all biases."""

from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import (
    HIDDEN_NAMES,
    LAYERNORM,
    ROPE_KEYS,
    TO_ACTIVATIONS,
    Family,
    read_activation,
    read_partial_rotary,
    write_partial_rotary,
)
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.layout import Stored, half_split, head, linear, norm, plain, table

DEFAULTS: dict[str, Any] = {
    "vocab_size": 51_200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "partial_rotary_factor": 0.5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    return read_activation(theirs, "hidden_act") | read_partial_rotary(theirs) | heads


def _write(c: Config) -> dict:
    return write_partial_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "hidden_act": TO_ACTIVATIONS[c.model.activation],
    }


def _outside(c: Config) -> list[Stored]:
    return [
        table("model.embed_tokens.weight", c), *norm("model.final_layernorm", "head/norm", c), *head("lm_head", c)
    ]  # fmt: skip


def _layer(c: Config) -> list[Stored]:
    D, F, H, K, at = c.model.d_model, c.model.ff_size, c.model.heads, c.model.head_size, "model.layers.{}"
    rotated = [
        Stored(f"{at}.self_attn.{name}_proj.weight", (heads * K, D), half_split(name, c, heads), seen=(heads, K, D))
        for name, heads in (("q", H), ("k", c.model.key_value_heads))
    ]
    return [
        *norm(f"{at}.input_layernorm", "norm", c),
        *rotated,
        linear(f"{at}.self_attn.v_proj", "v", c.model.key_value_heads * K, D),
        *list_qkv_biases(c),
        linear(f"{at}.self_attn.dense", "o", D, H * K),
        plain(f"{at}.self_attn.dense.bias", "o_bias", D),
        linear(f"{at}.mlp.fc1", "up", F, D),
        plain(f"{at}.mlp.fc1.bias", "up_bias", F),
        linear(f"{at}.mlp.fc2", "down", D, F),
        plain(f"{at}.mlp.fc2.bias", "down_bias", D),
    ]


PHI = Family(
    architecture="PhiForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"},
    defaults=DEFAULTS,
    fixed={"qk_layernorm": (False,), "tie_word_embeddings": (False,)},
    ours=LAYERNORM | {"block": "parallel", "bias": "all", "head_bias": True, "positions": "rotary"},
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", *ROPE_KEYS),
    outside=_outside,
    layer=_layer,
    dropouts=("attention_dropout", "embd_pdrop", "resid_pdrop"),
    harmless=("embd_layer_norm",),
    variants=lambda c: {
        "tied": (False,),
        "rotary_dims": None,
        "rotary_scaling": None,
        "rotary_theta": None,
        "kv_heads": None,
    },
)
