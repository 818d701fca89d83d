"""Parts of every layer's matrix in exchange for full matrices of some layers."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shardformer.collectives import split_axes


def apply_to_full_matrices(function: Callable[[Array], Array], parts: Array, spec: P) -> Array:
    """Applies a function of full matrices [layers, D, F] to this shard's parts of all layers' matrices, [L, d, f].

    The shards share the layers. No more bytes are sent than by a gather of each matrix. Experts [L, E, D, F] that are
    split over shards stay so: each is a matrix of its own.
    """
    x, undone = parts, []
    for dimension in range(parts.ndim - 2, len(spec)):
        for axis in reversed(split_axes(spec[dimension] or ())):
            layers_of_shard = -(-x.shape[0] // lax.axis_size(axis))
            join = _exchange if 2 * layers_of_shard <= x.shape[0] else _gather  # an exchange pays in both directions
            x, undo = join(x, axis, dimension)
            undone.append(undo)
    x = function(x)
    for undo in reversed(undone):
        x = undo(x)
    return x


def _exchange(x: Array, axis: str, dimension: int) -> tuple[Array, Callable]:
    """Joins the parts of this shard's share of the layers; zeros fill up layers that do not divide."""
    layers = x.shape[0]
    padded = jnp.pad(x, ((0, -layers % lax.axis_size(axis)), *[(0, 0)] * (x.ndim - 1)))

    def undo(full):
        return lax.all_to_all(full, axis, split_axis=dimension, concat_axis=0, tiled=True)[:layers]

    return lax.all_to_all(padded, axis, split_axis=0, concat_axis=dimension, tiled=True), undo


def _gather(x: Array, axis: str, dimension: int) -> tuple[Array, Callable]:
    """Joins the parts of all layers."""
    size = x.shape[dimension]

    def undo(full):
        return lax.dynamic_slice_in_dim(full, lax.axis_index(axis) * size, size, dimension)

    return lax.all_gather(x, axis, axis=dimension, tiled=True), undo
