"""shard_map's types (the mesh axes over which an array varies) in hand-written loops and backward passes."""

import jax
from jax import Array, lax


def varying_axes(*arrays: Array) -> frozenset[str]:
    """Returns the mesh axes over which any of the arrays varies."""
    return frozenset().union(*[jax.typeof(array).manual_axis_type.varying for array in arrays])


def vary_like(tree, *arrays: Array):
    """Marks values as varying over the axes of `arrays` too, such as constants that a loop carries."""

    def vary(leaf):
        missing = tuple(varying_axes(*arrays) - varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def sum_to(gradient: Array, primal: Array) -> Array:
    """Sums a gradient over the axes on which `primal` is replicated."""
    axes = tuple(varying_axes(gradient) - varying_axes(primal))
    return lax.psum(gradient, axes) if axes else gradient
