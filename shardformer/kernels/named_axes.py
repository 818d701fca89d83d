"""Collectives over those of some named axes that have more than one shard.

An axis of size 1 splits nothing: no array varies over it, and no collective may name it. XLA's CPU compiler keeps
all-reduces of single devices, with a copy of the array each. An axis may be a mesh axis or the axis of a vmap.
"""

import jax.numpy as jnp
from jax import Array, lax

Axes = str | tuple[str, ...]


def split_axes(axes: Axes) -> tuple[str, ...]:
    """Returns those of the axes that have more than one shard."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if lax.axis_size(name) > 1)


def vary(x: Array, axes: Axes) -> Array:
    """Marks an array as varying over the axes, over which it must not vary yet."""
    names = split_axes(axes)
    return lax.pcast(x, names, to="varying") if names else x


def index(axes: Axes) -> Array:
    """Returns this shard's index."""
    names = split_axes(axes)
    return lax.axis_index(names) if names else jnp.int32(0)


def psum(tree, axes: Axes):
    """Sums over the shards."""
    names = split_axes(axes)
    return lax.psum(tree, names) if names else tree


def pmean(tree, axes: Axes):
    """Averages over the shards."""
    names = split_axes(axes)
    return lax.pmean(tree, names) if names else tree


def pmax(x: Array, axes: Axes) -> Array:
    """Returns the maximum over the shards."""
    names = split_axes(axes)
    return lax.pmax(x, names) if names else x


def pmin(x: Array, axes: Axes) -> Array:
    """Returns the minimum over the shards."""
    names = split_axes(axes)
    return lax.pmin(x, names) if names else x
