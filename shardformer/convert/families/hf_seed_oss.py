"""Seed-OSS: `SeedOssForCausalLM`. Qwen2 with a size of its heads, and biases that may be left out."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, list_layer, read_settings, write_settings
from shardformer.convert.families.hf_qwen2 import QWEN_2, list_qkv_biases
from shardformer.convert.families.layout import Stored


def read_biased(theirs: dict) -> dict:
    """Returns our keys of a Llama whose queries, keys and values have biases if attention_bias is true."""
    return read_settings(theirs) | {"bias": "qkv" if theirs["attention_bias"] else "none"}


def write_biased(c: Config) -> dict:
    return write_settings(c) | {"attention_bias": c.model.bias == "qkv"}


def _layer(c: Config) -> list[Stored]:
    return [*list_layer(c), *(list_qkv_biases(c) if c.model.bias == "qkv" else [])]


SEED_OSS = dataclasses.replace(
    QWEN_2,
    architecture="SeedOssForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 155_136, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288, "attention_bias": True,
        "bos_token_id": 0, "pad_token_id": 1,
    },
    fixed={"attention_out_bias": (False,), "mlp_bias": (False,)},
    read=read_biased,
    write=write_biased,
    also=LLAMA.also,
    layer=_layer,
    dropouts=(*LLAMA.dropouts, "residual_dropout"),
    silent=("pretraining_tp",),
    variants=lambda c: LLAMA.variants(c) | {"bias": ("none", "qkv")},
)  # fmt: skip
