"""Gemma 3, the models of text: `Gemma3ForCausalLM`. Layers with a window have a separate rotary base."""

from typing import Any

from shardformer.config import Config
from shardformer.config.rotary_scaling import UNTRUNCATED
from shardformer.convert.families import gemma
from shardformer.convert.families.family import Family, find_rope, read_scaling, write_rope
from shardformer.convert.families.hf_llama import LLAMA, list_outside
from shardformer.convert.families.layer_types import FULL, SLIDING, read_layer_types, read_window, to_keys
from shardformer.convert.families.layout import Stored, half_split
from shardformer.errors import UsageError

DEFAULTS = gemma.DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
THETA, WINDOW_THETA = 1e6, 1e4


def _read(theirs: dict) -> dict:
    windows = to_keys(read_layer_types(theirs, _find_pattern(theirs)), read_window(theirs))
    full, sliding = find_ropes(theirs, "Gemma 3")
    rotary = {"rotary_theta": float(full.get("rope_theta", theirs.get("rope_theta", THETA)))}
    rotary |= read_scaling(full, theirs["max_position_embeddings"])
    if windows["window"]:
        theta = sliding.get("rope_theta", theirs.get("rope_local_base_freq", WINDOW_THETA))
        rotary["window_rotary_theta"] = float(theta)
    return gemma.read_settings(theirs) | windows | rotary


def _find_pattern(theirs: dict) -> str:
    """Returns the pattern of layers, which config.json of before `layer_types` names by its length."""
    every = theirs.get("sliding_window_pattern", 6)
    if type(every) is not int or every < 1:
        raise UsageError(f"sliding_window_pattern={every!r:.80} is not computed here; expected a number of layers")
    return "w" * (min(every, theirs["num_hidden_layers"] + 1) - 1) + "f"


def find_ropes(theirs: dict, family: str) -> tuple[dict, dict]:
    """Returns the rotary settings of full layers and of layers with a window, as transformers reads them."""
    both = theirs.get("rope_parameters") or {}
    if unknown := [name for name in both if name not in (FULL, SLIDING)]:
        raise UsageError(f"rope_parameters has {unknown[0]!r:.80}; expected the settings of {FULL} and of {SLIDING}")
    full = (both.get(FULL) or {}) | (theirs.get("rope_scaling") or {})
    full, sliding = (find_rope({"rope_parameters": rope}) for rope in (full, both.get(SLIDING)))
    for rope in full, sliding:
        if rope.get("partial_rotary_factor") not in (None, 1):
            share = rope["partial_rotary_factor"]
            raise UsageError(f"partial_rotary_factor={share!r:.80} is not computed by {family}; expected 1.0")
        if not rope.get("truncate", True):  # transformers looks for it outside of the settings of a kind of layers
            raise UsageError(f"truncate={rope['truncate']!r:.80} is not computed by {family}; expected True")
    if read_scaling(sliding, 1):
        raise UsageError(f"rope_parameters: {SLIDING} has {sliding!r:.80}; only full layers may have a scaling here")
    return full, sliding


def _write(c: Config) -> dict:
    theta = c.model.window_rotary_theta or c.model.rotary_theta
    # Libraries of before `rope_parameters` read the older names.
    older: dict[str, Any] = {"rope_theta": c.model.rotary_theta, "rope_local_base_freq": theta}
    older |= {"rope_scaling": write_rope(c)} if c.model.rotary_scaling else {}
    both = {FULL: write_rope(c), SLIDING: {"rope_type": "default", "rope_theta": theta}}
    return gemma.write_settings(c) | older | {"rope_parameters": both}


def _layer(c: Config) -> list[Stored]:
    K = c.model.head_size
    norms = [
        Stored(
            f"model.layers.{{}}.self_attn.{name}_norm.weight", (K,), half_split(f"{name}_head_scale", c, 1), seen=(1, K)
        )
        for name in "qk"
    ]
    return gemma.list_layer(c) + norms


def find_rope_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values of `rotary_scaling` and `window_rotary_theta` that `find_ropes` can have read."""
    scaled_alike = c.model.window and not c.model.window_rotary_theta  # in layers with a window too
    has_none = scaled_alike or c.model.rotary_scaling.startswith(f"yarn{UNTRUNCATED}")
    return {"window_rotary_theta": None, "rotary_scaling": ("",) if has_none else None}


def _find_variants(c: Config) -> dict[str, tuple | None]:
    return gemma.find_variants(c) | find_rope_variants(c)


GEMMA_3 = Family(
    architecture="Gemma3ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed=gemma.FIXED,
    ours=gemma.OURS | {"qk_norm": "head"},
    read=_read,
    write=_write,
    also=(
        *gemma.ALSO,
        "sliding_window_pattern",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_local_base_freq",
    ),
    outside=list_outside,
    layer=_layer,
    dropouts=("attention_dropout",),
    silent=("_sliding_window_pattern",),
    harmless=(*gemma.HARMLESS, "attn_logit_softcapping"),  # which Gemma 3 has only in its configuration
    variants=_find_variants,
)
