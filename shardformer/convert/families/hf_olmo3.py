"""OLMo 3: `Olmo3ForCausalLM`. OLMo 2 with a window in three of four layers, which have another rotary base."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import GATED_ACTIVATIONS, read_activation, read_scaling, write_rope
from shardformer.convert.families.hf_gemma3 import find_rope_variants, find_ropes
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_olmo2 import OLMO_2
from shardformer.convert.families.layer_types import (
    FULL,
    SLIDING,
    find_window_variants,
    list_types,
    read_layer_types,
    read_window,
    to_keys,
)

THETA = 500_000.0


def _read(theirs: dict) -> dict:
    letters = read_layer_types(theirs, "wwwf")
    windows = to_keys(letters, read_window(theirs) if "w" in letters else 0)
    full, sliding = find_ropes(theirs, "OLMo 3")
    rotary = {"rotary_theta": float(full.get("rope_theta", theirs.get("rope_theta", THETA)))}
    rotary |= read_scaling(full, theirs["max_position_embeddings"])
    if windows["window"]:
        rotary["window_rotary_theta"] = float(sliding.get("rope_theta", THETA))
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    return read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | heads | windows | rotary


def _write(c: Config) -> dict[str, Any]:
    theta = c.model.window_rotary_theta or c.model.rotary_theta
    return {
        "num_key_value_heads": c.model.key_value_heads,
        "hidden_act": "silu",
        "sliding_window": c.model.window or c.model.seq,
        "layer_types": list_types(c, SLIDING, FULL),
        "rope_parameters": {FULL: write_rope(c), SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


def _find_variants(c: Config) -> dict[str, tuple | None]:
    free: dict[str, tuple | None] = {"kv_heads": None, "rotary_theta": None}
    sizes = {"activation": ("swiglu",), "rotary_dims": (None, c.model.head_size)}
    return free | sizes | find_window_variants(c) | find_rope_variants(c)


OLMO_3 = dataclasses.replace(
    OLMO_2,
    architecture="Olmo3ForCausalLM",
    defaults={key: value for key, value in OLMO_2.defaults.items() if key != "head_dim"} | {"sliding_window": 4096},
    read=_read,
    write=_write,
    also=tuple(key for key in LLAMA.also if key not in ("head_dim", "partial_rotary_factor"))
    + ("layer_types", "sliding_window"),
    variants=_find_variants,
)
