"""CWM: `CwmForCausalLM`. Llama with a window in three of four layers, the first of which is full."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, read_settings, write_settings
from shardformer.convert.families.layer_types import (
    FULL,
    SLIDING,
    find_window_variants,
    list_types,
    read_layer_types,
    read_window,
    to_keys,
)

ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    if not (theirs.get("rope_scaling") or theirs.get("rope_parameters")):
        theirs = theirs | {"rope_parameters": ROPE}
    letters = read_layer_types(theirs, "fwww")
    return read_settings(theirs) | to_keys(letters, read_window(theirs) if "w" in letters else 0)


def _write(c: Config) -> dict:
    window = c.model.window or c.model.seq  # transformers needs a number even if all layers are full
    return write_settings(c) | {"sliding_window": window, "layer_types": list_types(c, SLIDING, FULL)}


CWM = dataclasses.replace(
    LLAMA,
    architecture="CwmForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 128_256, "hidden_size": 6144, "intermediate_size": 21_504, "num_hidden_layers": 64,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_theta": 1e6, "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
    },
    fixed={"mlp_bias": (False,), "attention_bias": (False,)},
    read=_read,
    write=_write,
    also=(*LLAMA.also, "layer_types"),
    harmless=(),
    variants=lambda c: LLAMA.variants(c) | find_window_variants(c),
)  # fmt: skip
