"""Quantises a matrix while it is read, so that the float values of only a few layers are in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.checkpoint import StoredLeaf
from shardformer.devices import programs
from shardformer.model.model import Model

BLOCK = 32 * 2**20  # bytes of float values that are read together, unless a layer has more


def read_leaf(model: Model, name: str, leaf: StoredLeaf) -> Any:
    """Returns a parameter of a checkpoint as the model stores it: the array, or the tuple of its codes and scales."""
    rows = max(1, BLOCK // (4 * max(1, int(np.prod(leaf.shape[1:], dtype=np.int64)))))
    weights: Any = model.layout.weights
    is_small = not leaf.shape or leaf.shape[0] <= rows
    if is_small or not weights.is_quantized(name) or not weights.quantizes_rows(name) or leaf.splits_rows:
        return model.store_leaf(name, leaf.read())
    return _quantize_rows(model, name, leaf, rows)


def _quantize_rows(model: Model, name: str, leaf: StoredLeaf, rows: int) -> tuple[jax.Array, ...]:
    """Returns the parts of a matrix, made of this many rows of its first axis at a time."""
    quantize = functools.partial(model.layout.weights.quantize, name)
    shapes = jax.eval_shape(quantize, jax.ShapeDtypeStruct(leaf.shape, np.float32))

    def make_empty():
        return tuple(jnp.zeros(part.shape, part.dtype) for part in shapes)

    def put_rows(parts, block, first):
        new = zip(parts, quantize(block), strict=True)
        return tuple(lax.dynamic_update_slice_in_dim(part, values, first, 0) for part, values in new)

    shardings = model.find_part_shardings(name)
    parts = programs.jit(make_empty, out_shardings=shardings)()
    put = programs.jit(put_rows, donate_argnums=0, out_shardings=shardings)
    for start in range(0, leaf.shape[0], rows):
        first = min(start, leaf.shape[0] - rows)  # the last block has rows of the one before: one program for all
        parts = jax.block_until_ready(put(parts, leaf.read_rows(first, rows), np.int32(first)))
    return parts
