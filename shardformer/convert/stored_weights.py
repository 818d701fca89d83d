"""Runs whose checkpoints store codes: matrices are quantised when they are written, and dequantised when they are read.

A layer is quantised at a time. Only its codes and scales are in memory besides the float values that are read.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from shardformer.config import Config
from shardformer.config.names import CODES, is_part, is_stacked
from shardformer.convert.leaves import Array, Filled, Leaves, copy_into, each_row
from shardformer.layout import resolve
from shardformer.training.run_folder import Run


def asks_to_store(arguments: list[str]) -> bool:
    """Returns whether the arguments of a conversion of a run name the form of its weights."""
    return any(word.startswith("weights=") for word in arguments)


def change_form(run: Run, form: str) -> Run:
    """Returns the run with weights in this form, in float32 otherwise, without layers that only training has."""
    changes = {"weights": form, "quantize_aware": "none", "param_dtype": "float32", "moment_dtype": "float32"}
    return dataclasses.replace(run, config=run.config.objective.without_training_layers().replace(**changes))


def quantize(params: Leaves, config: Config) -> Leaves:
    """Returns float parameters in the stored form of a configuration, computed when they are read."""
    weights = resolve(config.replace(mesh="1x1")).weights
    stored: dict[str, Array] = {}
    for name, leaf in params.items():
        if not weights.is_quantized(name):
            stored[name] = _as_float(leaf)
            continue
        shape = jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(np.float32))
        parts = jax.eval_shape(functools.partial(weights.quantize, name), shape)
        compute = _Parts(jax.jit(functools.partial(weights.quantize, name)), leaf, is_stacked(name), parts)
        for number, (suffix, part) in enumerate(zip(weights.suffixes(name), parts, strict=True)):
            stored[f"{name}{suffix}"] = Filled(part.shape, part.dtype, functools.partial(compute.fill, number))
    return stored


class _Parts:
    """The parts of one matrix of all layers. The small ones are kept, so that each layer is quantised at most twice."""

    def __init__(self, function, leaf: Array, stacked: bool, shapes: tuple):
        self._function, self._leaf, self._stacked, self._shapes = function, leaf, stacked, shapes
        self._small: list[np.ndarray] = []

    def fill(self, number: int, target: np.ndarray) -> None:
        """Writes the part of this number: 0 is that of the codes."""
        if number and self._small:
            target[...] = self._small[number - 1]
            return
        small = [np.empty(shape.shape, shape.dtype) for shape in self._shapes[1:]]
        for index, matrix in enumerate(each_row(self._leaf)) if self._stacked else [(..., self._leaf[...])]:
            parts = [np.asarray(part) for part in self._function(np.asarray(matrix, np.float32))]
            for whole, part in zip(small, parts[1:], strict=True):
                whole[index] = part
            if number == 0:
                target[index] = parts[0]
        self._small = small
        if number:
            target[...] = small[number - 1]


def dequantize(params: Leaves, config: Config) -> Leaves:
    """Returns the float32 parameters of stored ones, computed when they are read."""
    weights: Any = resolve(config.replace(mesh="1x1")).weights
    exact: dict[str, Array] = {}
    for name, leaf in params.items():
        if name.endswith(CODES):
            base = name.removesuffix(CODES)
            parts = [params[f"{base}{suffix}"] for suffix in weights.suffixes(base)]
            compute = jax.jit(functools.partial(weights.dequantize, base))
            of_layer = [part[0] if is_stacked(base) else np.empty(part.shape, part.dtype) for part in parts]
            shape = jax.eval_shape(compute, of_layer).shape
            shape = (leaf.shape[0], *shape) if is_stacked(base) else shape
            exact[base] = _compute_by_layer(base, shape, compute, parts)
        elif not is_part(name):
            exact[name] = _as_float(leaf)
    return exact


def round_to_codes(params: Leaves, config: Config) -> Leaves:
    """Returns float parameters with the values of the codes that `quantize_aware` names, computed when they are read.

    A layer at a time, as `quantized/rounded_weights.py` rounds all layers of a training state.
    """
    weights: Any = resolve(config.with_weights(config.stored.quantize_aware).replace(mesh="1x1")).weights
    rounded = dict(params)
    for name, leaf in params.items():
        if weights.is_quantized(name):
            compute = jax.jit(functools.partial(_round, weights, name))
            rounded[name] = _compute_by_layer(name, tuple(leaf.shape), compute, [leaf])
    return rounded


def _round(weights: Any, name: str, parts: list[jax.Array]) -> jax.Array:
    return weights.dequantize(name, weights.quantize(name, *parts))


def _compute_by_layer(name: str, shape: tuple[int, ...], compute, parts: list) -> Filled:
    """Returns the float32 array that `compute` makes of its parts; of those of a layer, if it has layers."""
    if not is_stacked(name):
        return Filled(shape, np.dtype(np.float32), functools.partial(_fill_layer, compute, parts))
    fill, fill_row = (functools.partial(fill, compute, parts) for fill in (_fill_layers, _fill_layer))
    return Filled(shape, np.dtype(np.float32), fill, fill_row)


def _as_float(leaf: Array) -> Filled:
    fill, fill_row = functools.partial(copy_into, source=leaf), functools.partial(_copy_row, leaf)
    return Filled(tuple(leaf.shape), np.dtype(np.float32), fill, fill_row)


def _copy_row(leaf: Array, target: np.ndarray, row: int) -> None:
    target[...] = leaf[row]


def _fill_layers(compute, parts: list, target: np.ndarray) -> None:
    for layer in range(target.shape[0]):
        _fill_layer(compute, parts, target[layer], layer)


def _fill_layer(compute, parts: list, target: np.ndarray, layer=...) -> None:
    target[...] = compute([np.asarray(part[layer]) for part in parts])


def measure_drift(params: Leaves, others: Leaves) -> float:
    """Returns the root mean square of the differences of matrices, relative to that of the others' values."""
    differences = squares = 0.0
    for name, other in others.items():
        first, second = np.empty(other.shape, np.float32), np.empty(other.shape, np.float32)
        copy_into(first, params[name])
        copy_into(second, other)
        differences += float(np.square(first - second, dtype=np.float64).sum())
        squares += float(np.square(second, dtype=np.float64).sum())
    return (differences / squares) ** 0.5 if squares else 0.0
