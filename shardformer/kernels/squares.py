"""The squared norm of arrays that are split over mesh axes."""

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from shardformer.kernels import named_axes


def sum_squares(parts: list[Array], specs: list[P]) -> Array:
    """Returns the sum of squares of all arrays, of which this shard has parts, by at most one all-reduce of a scalar.

    `specs` names the axes that each array is split over.
    """
    axes_of = [_axes(spec) for spec in specs]
    axes = tuple(sorted(set().union(*axes_of)))
    total = sum(
        _square_once(part, tuple(a for a in axes if a not in own)) for part, own in zip(parts, axes_of, strict=True)
    )
    return named_axes.psum(total, axes)


def _square_once(part: Array, replicated: tuple[str, ...]) -> Array:
    """Returns the sum of squares, or zero if another shard counts the same values."""
    square = jnp.square(part).sum()
    return jnp.where(named_axes.index(replicated) == 0, square, 0.0) if named_axes.split_axes(replicated) else square


def _axes(spec: P) -> set[str]:
    return {axis for entry in spec if entry for axis in named_axes.split_axes(entry)}
