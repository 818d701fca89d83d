"""Granite: `GraniteForCausalLM`. Llama with factors on embeddings, branches, attention logits and output logits."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, read_settings, write_settings
from shardformer.errors import UsageError

FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _read(theirs: dict) -> dict:
    for key in FACTORS:
        if type(theirs[key]) not in (int, float) or not theirs[key] > 0:
            raise UsageError(f"{key}={theirs[key]!r:.80} is not computed here; expected a number above 0")
    result = read_settings(theirs)
    size = result["head_dim"] or theirs["hidden_size"] // theirs["num_attention_heads"]
    scale = float(theirs["attention_multiplier"])
    return result | {
        "embed_scale": float(theirs["embedding_multiplier"]),
        "residual_scale": float(theirs["residual_multiplier"]),
        "attention_scale": None if scale == size**-0.5 else scale,
        "logits_scale": 1 / theirs["logits_scaling"],
    }


def _write(c: Config) -> dict[str, Any]:
    return write_settings(c) | {
        "embedding_multiplier": c.model.embed_scale,
        "residual_multiplier": c.model.residual_scale,
        "attention_multiplier": c.model.attention_scale or c.model.head_size**-0.5,
        "logits_scaling": 1 / c.model.logits_scale,
    }


def _find_variants(c: Config) -> dict[str, tuple | None]:
    factors = {"embed_scale": (c.model.embed_scale or 1.0,), "residual_scale": None, "attention_scale": None}
    return LLAMA.variants(c) | factors | {"logits_scale": (1 / (1 / c.model.logits_scale),)}


GRANITE = dataclasses.replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    defaults=LLAMA.defaults | dict.fromkeys(FACTORS, 1.0),
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    read=_read,
    write=_write,
    also=(*LLAMA.also, *FACTORS),
    silent=("pretraining_tp",),
    harmless=(),
    variants=_find_variants,
)
