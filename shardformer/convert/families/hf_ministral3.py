"""Ministral 3 and Devstral 2: `Ministral3ForCausalLM`. Mistral with YaRN, whose later queries have larger factors."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import find_rope
from shardformer.convert.families.hf_mistral import MISTRAL
from shardformer.convert.families.latent_arrays import OF_YARN, add_factor
from shardformer.errors import UsageError

GROWTH = "llama_4_scaling_beta"
ROPE_NAMES = (*OF_YARN, GROWTH, "max_position_embeddings")
# The scaling of a config.json that names none.
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, GROWTH: 0.1,
}  # fmt: skip


def read_growing(theirs: dict, default: dict) -> tuple[dict, dict]:
    """Returns their rotary settings in an object of YaRN, the default without one, and our key of growing queries."""
    rope = find_rope(theirs, ROPE_NAMES) or default
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        raise UsageError(f"rope_type={kind!r:.80} is not computed here; expected 'yarn', of which queries grow")
    return rope, {"query_growth": float(rope.get(GROWTH) or 0)}


def find_growing_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values of our keys with which transformers can compute the growth of queries."""
    is_yarn = c.model.rotary_scaling.startswith("yarn")
    return {"query_growth": None, "rotary_scaling": (c.model.rotary_scaling if is_yarn else "yarn:...",)}


def _read(theirs: dict) -> dict[str, Any]:
    rope, growth = read_growing(theirs, ROPE)
    rope = {name: value for name, value in add_factor(rope).items() if name not in ROPE_NAMES}
    others = {key: value for key, value in theirs.items() if key != "rope_scaling"}
    return MISTRAL.read(others | {"rope_parameters": rope}) | growth


def _write(c: Config) -> dict[str, Any]:
    return add_growth(c, MISTRAL.write(c))


def add_growth(c: Config, written: dict) -> dict[str, Any]:
    """Returns their keys with the growth in each object of rotary settings."""
    objects = {key: written[key] | {GROWTH: c.model.query_growth} for key in ("rope_parameters", "rope_scaling")}
    return written | objects


MINISTRAL_3 = dataclasses.replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    defaults=MISTRAL.defaults
    | {
        "vocab_size": 131_072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5, "sliding_window": None, "pad_token_id": 11,
    },
    read=_read,
    write=_write,
    variants=lambda c: MISTRAL.variants(c) | find_growing_variants(c),
)  # fmt: skip
