"""Command R7B: `Cohere2ForCausalLM`. Only the layers with a window rotate queries and keys."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families import hf_cohere
from shardformer.convert.families.hf_cohere import COHERE
from shardformer.convert.families.layer_types import FULL, SLIDING, list_types, read_layer_types, read_window, to_keys
from shardformer.errors import UsageError


def _read(theirs: dict) -> dict:
    every = theirs["sliding_window_pattern"]
    if type(every) is not int or every < 1:
        raise UsageError(f"sliding_window_pattern={every!r:.80} is not computed here; expected a number of layers")
    default = "w" * (min(every, theirs["num_hidden_layers"] + 1) - 1) + "f"
    letters = read_layer_types(theirs, default).replace("f", "n")
    return hf_cohere.read(theirs) | to_keys(letters, read_window(theirs))


def _write(c: Config) -> dict:
    window = c.model.window or c.model.seq  # without a number, no layer rotates
    return hf_cohere.write(c) | {"sliding_window": window, "layer_types": list_types(c, SLIDING, FULL)}


def _find_variants(c: Config) -> dict[str, tuple | None]:
    """A full layer of this family does not rotate."""
    mixed = c.model.layers_without_rotary != tuple(window is None for window in c.model.layer_windows)
    windows: dict[str, tuple | None] = {"window_pattern": ("wwwn",)} if mixed else {"window_pattern": None}
    return COHERE.variants(c) | windows | {"window": None}


COHERE_2 = dataclasses.replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    defaults=COHERE.defaults | {"rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    fixed={
        "attention_bias": (False,), "use_qk_norm": (False,), "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,), "use_parallel_block": (True,), "use_gated_activation": (True,),
    },
    read=_read,
    write=_write,
    also=(*COHERE.also, "layer_types"),
    silent=("pretraining_tp", "cache_implementation", "_sliding_window_pattern"),
    harmless=(*COHERE.harmless, "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing",
              "use_parallel_embedding"),
    variants=_find_variants,
)  # fmt: skip
