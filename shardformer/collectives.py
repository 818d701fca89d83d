"""Collectives over mesh axes, and the types (the axes over which an array varies) that shard_map gives arrays.

Collectives skip axes of size 1. Such an axis splits nothing: no array varies over it, and no collective may name it.
XLA's CPU compiler keeps all-reduces of single devices, with a copy of the array each. An axis may be a mesh axis or the
axis of a vmap.

`tokens_split` is Megatron's sequence parallelism: between the blocks, each shard of the model has its part of every
sequence, x_BtD; without it, all shards have the same x_BTD. Activations are summed over `mp` in their dtype: in
bfloat16 over 8 shards that costs at most 0.03% of a gradient.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer.config.names import MP

Axes = str | tuple[str, ...]


def split_axes(axes: Axes) -> tuple[str, ...]:
    """Returns those of the axes that have more than one shard."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if lax.axis_size(name) > 1)


def vary(x: Array, axes: Axes) -> Array:
    """Marks an array as varying over the axes, over which it must not vary yet. Its gradient is summed over them."""
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


def drop_unit_axes(specs, mesh: Mesh):
    """Leaves axes of one device out of specs, so that nothing varies over them inside a shard_map."""

    def keep(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name and mesh.shape[name] > 1) or None

    return jax.tree.map(lambda spec: P(*map(keep, spec)), specs)


def sum_squares(parts: list[Array], specs: list[P]) -> Array:
    """Returns the sum of squares of all arrays, of which this shard has parts, by at most one all-reduce of a scalar.

    `specs` names the axes that each array is split over.
    """
    axes_of = [_axes(spec) for spec in specs]
    axes = tuple(sorted(set().union(*axes_of)))
    total = sum(
        _square_once(part, tuple(a for a in axes if a not in split_over))
        for part, split_over in zip(parts, axes_of, strict=True)
    )
    return psum(total, axes)


def _square_once(part: Array, replicated: tuple[str, ...]) -> Array:
    """Returns the sum of squares, or zero if another shard counts the same values."""
    square = jnp.square(part).sum()
    return jnp.where(index(replicated) == 0, square, 0.0) if split_axes(replicated) else square


def _axes(spec: P) -> set[str]:
    return {axis for entry in spec if entry for axis in split_axes(entry)}


# The types of shard_map in hand-written loops and backward passes.


def varying_axes(*arrays: Array) -> frozenset[str]:
    """Returns the mesh axes over which any of the arrays varies."""
    return frozenset().union(*[jax.typeof(array).manual_axis_type.varying for array in arrays])


def vary_like(tree, *arrays: Array):
    """Marks values as varying over the axes of `arrays` too, for example constants that a loop carries."""

    def mark(leaf):
        missing = tuple(varying_axes(*arrays) - varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def sum_to(gradient: Array, primal: Array) -> Array:
    """Sums a gradient over the axes on which `primal` is replicated."""
    axes = tuple(varying_axes(gradient) - varying_axes(primal))
    return lax.psum(gradient, axes) if axes else gradient


# Tensor parallelism: the axis mp.


def local(size: int) -> int:
    """Returns this shard's part of a global size."""
    return size // lax.axis_size(MP)


def offset(local_size: int) -> Array:
    """Returns the index on the global axis at which this shard's slice starts."""
    return index(MP) * local_size


def fan_out(x: Array, tokens_split: bool = False) -> Array:
    """Passes a replicated activation to split work (Megatron's f): identity forward, one all-reduce backward.

    Without it, every product that follows would all-reduce its part of the gradient. With `tokens_split`: an
    all-gather forward and a reduce-scatter backward.
    """
    if tokens_split and _is_split():
        return lax.all_gather(x, MP, axis=1, tiled=True)
    return vary(x, MP)  # its transpose is the all-reduce


def reduce(x: Array, tokens_split: bool = False) -> Array:
    """Adds up the partial sums of split work (Megatron's g): one all-reduce forward, identity backward.

    With `tokens_split`: a reduce-scatter forward and an all-gather backward.
    """
    if tokens_split and _is_split():
        return lax.psum_scatter(x, MP, scatter_dimension=1, tiled=True)
    return psum(x, MP)


def vary_over_mp(x: Array) -> Array:
    """Marks a replicated value as varying over mp, for use on this shard's tokens; its gradient is one all-reduce."""
    return x if MP in varying_axes(x) else vary(x, MP)


def gather_last(x: Array, tokens_split: bool = False) -> Array:
    """Gathers the last axis from all shards' slices; backward, each shard keeps its slice.

    With `tokens_split`, each shard gathers it only for its tokens: an all-to-all forward and backward.
    """
    if not _is_split():
        return x
    if tokens_split:
        return lax.all_to_all(x, MP, split_axis=1, concat_axis=x.ndim - 1, tiled=True)
    return lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True, to="invarying")


def _is_split() -> bool:
    """Returns whether the model has more than one shard."""
    return lax.axis_size(MP) > 1
