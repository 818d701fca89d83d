"""Windows and rotary positions by layer: which layers have them, in the keys of transformers and in ours."""

from collections.abc import Sequence
from typing import Any

from shardformer.config import Config
from shardformer.errors import UsageError

SLIDING, FULL = "sliding_attention", "full_attention"
MAX_LAYERS = 10_000  # of a model whose layers are listed one by one


def check_layers(theirs: dict, key: str = "num_hidden_layers") -> int:
    """Returns the number of layers; rejects a number whose list of layers would fill the memory."""
    if not 0 < theirs[key] <= MAX_LAYERS:
        raise UsageError(f"{key}={theirs[key]!r:.80} is out of range; expected at most {MAX_LAYERS:,} layers")
    return theirs[key]


def read_window(theirs: dict, key: str = "sliding_window") -> int:
    """Returns the tokens that a layer with a window attends to, including itself."""
    window = theirs[key]
    if type(window) is not int or window < 1:
        raise UsageError(f"{key}={window!r:.80} cannot be a window; expected a number of tokens, at least 1")
    return window


def read_layer_types(theirs: dict, default: str) -> str:
    """Returns a letter for each layer, w or f, from `layer_types`; without it, the pattern `default` repeats."""
    layers, types = check_layers(theirs), theirs.get("layer_types")
    if types is None:
        return (default * layers)[:layers]
    letters = {SLIDING: "w", FULL: "f"}
    if not isinstance(types, list) or len(types) != layers or not all(kind in letters for kind in types):
        raise UsageError(
            f"layer_types={types!r:.80} is not computed here; expected {layers} names, each {SLIDING} or {FULL}"
        )
    return "".join(letters[kind] for kind in types)


def to_keys(letters: str, window: int) -> dict[str, Any]:
    """Returns our keys for layers of the types `letters`: the shortest pattern that repeats to them."""
    if set(letters) == {"f"}:
        return {"window": None, "window_pattern": ""}
    count = len(letters)
    size = next(size for size in range(1, count + 1) if (letters[:size] * count)[:count] == letters)
    pattern = "" if letters[:size] == "w" else letters[:size]
    return {"window": window if "w" in letters else None, "window_pattern": pattern}


def find_window_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values of our keys that a family computes if all of its layers rotate, with a window or without."""
    return {"window": None, "window_pattern": ("wf",) if any(c.model.layers_without_rotary) else None}


def list_types(c: Config, windowed: str, full: str) -> list[str]:
    """Returns the name of each layer's kind."""
    return [windowed if window else full for window in c.model.layer_windows]


def shorten(types: Sequence[str]) -> tuple[list[str], int]:
    """Returns the shortest list, and the number of its repetitions that give `types`."""
    count = len(types)
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    size = next(size for size in sizes if list(types[:size]) * (count // size) == list(types))
    return list(types[:size]), count // size
