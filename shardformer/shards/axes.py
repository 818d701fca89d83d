"""The collectives over `mp`, as a Megatron reader knows them.

`tokens_split` is Megatron's sequence parallelism: between the blocks, each shard of the model holds its part of every
sequence, x_BtD, where it would otherwise hold the same x_BTD as the others.
"""

import jax
from jax import lax

from shardformer.config.names import MP


def local(size: int) -> int:
    """This shard's part of a global size."""
    return size // lax.axis_size(MP)


def offset(local_size: int) -> jax.Array:
    """Where this shard's slice begins in the global axis."""
    return lax.axis_index(MP) * local_size


def fan_out(x, tokens_split: bool = False):
    """Megatron's f: a replicated activation enters split work. Identity forward, one all-reduce backward.

    Without it, every product that follows would all-reduce its own part of the gradient. With `tokens_split`, an
    all-gather forward and a reduce-scatter backward.
    """
    if tokens_split:
        return lax.all_gather(x, MP, axis=1, tiled=True)
    return lax.pcast(x, MP, to="varying") if _manual() else x


def reduce(x, tokens_split: bool = False):
    """Megatron's g: the partial sums of split work become whole. One all-reduce forward, identity backward.

    With `tokens_split`, a reduce-scatter forward and an all-gather backward.
    """
    return lax.psum_scatter(x, MP, scatter_dimension=1, tiled=True) if tokens_split else lax.psum(x, MP)


def vary(x):
    """What is whole on every shard, to be applied to its own tokens: the gradient is one all-reduce."""
    return x if MP in jax.typeof(x).manual_axis_type.varying else lax.pcast(x, MP, to="varying")


def gather_last(x, tokens_split: bool = False):
    """The whole last axis from every shard's slice of it; backward, each shard keeps its slice.

    With `tokens_split`, of this shard's tokens alone: an all-to-all each way.
    """
    if tokens_split:
        return lax.all_to_all(x, MP, split_axis=1, concat_axis=x.ndim - 1, tiled=True)
    to = "invarying" if _manual() else "varying"
    return lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True, to=to)


def _manual() -> bool:
    """Whether `mp` is a mesh axis under shard_map, and not the size-1 vmap of an initialisation."""
    return MP in jax.sharding.get_abstract_mesh().manual_axes
