"""Named axes of more than one shard: an axis of size 1 splits nothing, and no collective needs to name it."""

import jax.numpy as jnp
from jax import Array, lax

Axes = str | tuple[str, ...]


def split_axes(axes: Axes) -> tuple[str, ...]:
    """Returns those of the axes that have more than one shard."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if lax.axis_size(name) > 1)


def index(axes: Axes) -> Array:
    """Returns this shard's index."""
    names = split_axes(axes)
    return lax.axis_index(names) if names else jnp.int32(0)


def psum(tree, axes: Axes):
    """Sums over the shards."""
    names = split_axes(axes)
    return lax.psum(tree, names) if names else tree
