"""One operation of a traced program as its rule sees it, and the table of rules.

A rule is a function (operation, *arrays) -> array or tuple of arrays. An array has the mesh's axes before its own
(see lockstep.py), so a rule addresses its own axes from the end. Floats are float64, whatever the program stores.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import dtypes
from numpy import ndarray

from shardformer.exact.lockstep import Mesh

# The data of a threefry2x32 key as one element, so that rules of shapes serve keys too.
KEY = np.dtype([("high", np.uint32), ("low", np.uint32)])


class Operation(NamedTuple):
    """An operation of a program on one device."""

    name: str
    params: dict[str, Any]
    inputs: tuple  # shapes and dtypes on one device
    outputs: tuple
    mesh: Mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the only, or the first, output on one device."""
        return self.outputs[0].shape

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype of the first output."""
        return self.outputs[0].dtype

    def prefix(self, x: ndarray) -> tuple[int, ...]:
        """Returns the sizes of the mesh axes of an array."""
        return x.shape[: len(self.mesh)]


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of these operations."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


@functools.cache
def is_float(dtype) -> bool:
    return dtypes.issubdtype(dtype, np.inexact)


@functools.cache
def working_dtype(dtype) -> np.dtype:
    """Returns the dtype that rules compute in for a stored dtype."""
    if dtypes.issubdtype(dtype, dtypes.prng_key):
        return KEY
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if dtypes.issubdtype(dtype, np.floating) else np.dtype(dtype)


def own_axes(rank: int, axes) -> tuple[int, ...]:
    """Returns axes of an array of this rank, counted from the end."""
    return tuple(int(axis) - rank for axis in axes)


def share_prefix(operation: Operation, arrays) -> list[ndarray]:
    """Returns the arrays with the same sizes of mesh axes."""
    prefix = np.broadcast_shapes(*(operation.prefix(x) for x in arrays))
    return [np.broadcast_to(x, (*prefix, *x.shape[len(prefix) :])) for x in arrays]
