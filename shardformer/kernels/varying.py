"""The types of shard_map, over which mesh axes an array differs, in hand-written loops and backward passes."""

import jax
from jax import lax


def varying_axes(*arrays) -> frozenset[str]:
    """The mesh axes over which any of them differs from shard to shard; None differs nowhere."""
    known = [array for array in arrays if array is not None]
    return frozenset().union(*[jax.typeof(array).manual_axis_type.varying for array in known])


def vary_like(tree, *arrays):
    """Constants as a loop's carry that varies as `arrays` do."""
    axes = tuple(varying_axes(*arrays))
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), tree) if axes else tree


def sum_to(gradient, primal):
    """The gradient of what is the same on every shard of an axis: the sum over those shards."""
    if primal is None:
        return None
    axes = tuple(varying_axes(gradient) - varying_axes(primal))
    return lax.psum(gradient, axes) if axes else gradient
