"""Mixtures of experts as Hugging Face has them: arrays of one expert each, and the layers that have experts."""

import functools
from typing import Any

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.layer_types import check_layers
from shardformer.convert.families.layout import Part, Stored, linear, plain
from shardformer.errors import UsageError

DENSE_LAYERS = ("decoder_sparse_step", "mlp_only_layers")  # their keys that `read_dense_layers` reads
QWEN_NAMES = {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"}


def _show(expert: int, ours: np.ndarray) -> np.ndarray:
    """Returns the matrix of one expert as torch.nn.Linear stores it."""
    return ours[expert].T


def list_experts(c: Config, at: str, names: dict[str, str]) -> list[Stored]:
    """Lists the router `at.gate` and the matrices of the experts; `names` has theirs by ours."""
    D, F = c.model.d_model, c.mixture.expert_size
    shapes = {"expert_gate": (F, D), "expert_up": (F, D), "expert_down": (D, F)}
    matrices = [
        Stored(f"{at}.experts.{expert}.{theirs}.weight", shapes[ours], (Part(ours, functools.partial(_show, expert)),))
        for expert in range(c.experts.experts)
        for ours, theirs in names.items()
    ]
    return [linear(f"{at}.gate", "router", c.experts.experts, D), *matrices]


def list_joined(c: Config, gate_and_up: str, down: str) -> list[Stored]:
    """Lists two arrays with the matrices of all experts of a layer; the first one has gates, then ups."""
    D, F, E = c.model.d_model, c.mixture.expert_size, c.experts.experts
    joined = tuple(Part(ours, _turn, (slice(None), cut)) for ours, cut in _cut_columns(F).items())
    return [Stored(gate_and_up, (E, 2 * F, D), joined), Stored(down, (E, D, F), (Part("expert_down", _turn),))]


def list_joined_by_inputs(c: Config, gate_and_up: str, down: str) -> list[Stored]:
    """Lists the arrays of `list_joined` where each matrix is stored as ours, [inputs, outputs]."""
    D, F, E = c.model.d_model, c.mixture.expert_size, c.experts.experts
    joined = tuple(Part(ours, cut=(slice(None), slice(None), cut)) for ours, cut in _cut_columns(F).items())
    return [Stored(gate_and_up, (E, D, 2 * F), joined), plain(down, "expert_down", E, F, D)]


def _cut_columns(width: int) -> dict[str, slice]:
    """Returns the columns of each matrix in an array that joins gates and ups."""
    return {"expert_gate": slice(0, width), "expert_up": slice(width, 2 * width)}


def _turn(ours: np.ndarray) -> np.ndarray:
    """Returns the matrices of all experts as torch.nn.Linear stores each."""
    return ours.swapaxes(1, 2)


def list_shared(c: Config, at: str) -> list[Stored]:
    """Lists the matrices of the expert `at` that every token uses, and the vector of its sigmoid if it has one."""
    D, F = c.model.d_model, c.experts.shared_width
    sigmoid = [Stored(f"{at}_gate.weight", (1, D), (Part("shared_scale", show_as_row),))]
    return [
        linear(f"{at}.gate_proj", "shared_gate", F, D),
        linear(f"{at}.up_proj", "shared_up", F, D),
        linear(f"{at}.down_proj", "shared_down", D, F),
        *(sigmoid if c.experts.shared_gate else []),
    ]


def show_as_row(ours: np.ndarray) -> np.ndarray:
    """Returns a vector as the only row of a matrix."""
    return ours[None]


def replace_dense(c: Config, layer: list[Stored], experts: list[Stored]) -> list[Stored]:
    """Returns the arrays of a layer with experts instead of the dense feed-forward, or with both if layers differ."""
    if c.mixture.mixes_layers:
        return [*layer, *experts]
    return [*(stored for stored in layer if stored.parts[0].ours not in ("up", "gate", "down")), *experts]


def check_experts(theirs: dict, *keys: str) -> None:
    """Rejects a number, or a width, of what every layer of a family has."""
    for key in keys:
        if type(theirs[key]) is not int or theirs[key] < 1:
            raise UsageError(f"{key}={theirs[key]!r:.80} is not computed here; expected at least 1")


def read_dense_layers(theirs: dict) -> dict[str, Any]:
    """Returns our keys for the layers that have no experts."""
    step, dense = theirs["decoder_sparse_step"], theirs["mlp_only_layers"] or []
    if type(step) is not int or step < 1:
        raise UsageError(f"decoder_sparse_step={step!r:.80} is not computed here; expected at least 1")
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise UsageError(f"mlp_only_layers={dense!r:.80} is not computed here; expected a list of layers")
    layers, dense = check_layers(theirs), set(dense)
    letters = "".join("e" if (i + 1) % step == 0 and i not in dense else "d" for i in range(layers))
    return to_keys(letters, f"decoder_sparse_step={step} and mlp_only_layers={sorted(dense)!r:.80}")


def to_keys(letters: str, said: str) -> dict[str, Any]:
    """Returns our keys for layers with experts (e) and dense ones (d); `said` are the keys that give the letters."""
    if "e" not in letters:
        raise UsageError(f"{said} leave none of {len(letters)} layers with experts; expected at least one")
    first = letters.index("e")
    choices = [(0, _shorten(letters)), (first, _shorten(letters[first:]))]
    dense_first, pattern = min(choices, key=lambda choice: choice[0] + len(choice[1]))
    return {"dense_first": dense_first, "expert_pattern": "" if pattern == "e" else pattern}


def write_dense_layers(c: Config) -> dict[str, Any]:
    """Returns their keys for the layers that have no experts."""
    dense = [i for i, is_sparse in enumerate(c.mixture.sparse_layers) if not is_sparse]
    for step in range(1, c.model.layers + 1):
        if dense == [i for i in range(c.model.layers) if (i + 1) % step]:
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _shorten(letters: str) -> str:
    """Returns the shortest pattern that repeats to these letters."""
    count = len(letters)
    size = next(size for size in range(1, count + 1) if (letters[:size] * count)[:count] == letters)
    return letters[:size]
