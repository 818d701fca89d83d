"""The arrays of mixtures of experts, which Hugging Face stores one expert at a time."""

import functools

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.layout import Part, Stored, linear


def _show(expert: int, ours: np.ndarray) -> np.ndarray:
    """Returns the matrix of one expert as torch.nn.Linear stores it."""
    return ours[expert].T


def list_experts(c: Config, at: str, names: dict[str, str]) -> list[Stored]:
    """Lists the router `at.gate` and the matrices of the experts; `names` has theirs by ours."""
    D, F = c.model.d_model, c.expert_size
    shapes = {"expert_gate": (F, D), "expert_up": (F, D), "expert_down": (D, F)}
    matrices = [
        Stored(f"{at}.experts.{expert}.{theirs}.weight", shapes[ours], (Part(ours, functools.partial(_show, expert)),))
        for expert in range(c.experts.experts)
        for ours, theirs in names.items()
    ]
    return [linear(f"{at}.gate", "router", c.experts.experts, D), *matrices]


def without_dense(layer: list[Stored]) -> list[Stored]:
    """Returns the arrays of a layer without those of the dense feed-forward."""
    return [stored for stored in layer if stored.parts[0].ours not in ("up", "gate", "down")]
