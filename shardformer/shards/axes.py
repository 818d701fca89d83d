"""The collectives over `mp`, named as a Megatron reader knows them.

`tokens_split` is Megatron's sequence parallelism: between the blocks, each shard of the model holds its part of every
sequence, x_BtD; without it, all shards hold the same x_BTD. Activations are summed over `mp` in their own type: in
bfloat16 over 8 shards that costs at most 0.03% of a gradient.
"""

import jax
from jax import Array, lax

from shardformer.config.names import MP


def local(size: int) -> int:
    """Returns this shard's part of a global size."""
    return size // lax.axis_size(MP)


def offset(local_size: int) -> Array:
    """Returns the index on the global axis at which this shard's slice begins."""
    return lax.axis_index(MP) * local_size


def fan_out(x: Array, tokens_split: bool = False) -> Array:
    """Passes a replicated activation to split work (Megatron's f): identity forward, one all-reduce backward.

    Without it, every product that follows would all-reduce its own part of the gradient. With `tokens_split`: an
    all-gather forward and a reduce-scatter backward.
    """
    if tokens_split:
        return lax.all_gather(x, MP, axis=1, tiled=True)
    return lax.pcast(x, MP, to="varying") if _is_sharded() else x


def reduce(x: Array, tokens_split: bool = False) -> Array:
    """Adds up the partial sums of split work (Megatron's g): one all-reduce forward, identity backward.

    With `tokens_split`: a reduce-scatter forward and an all-gather backward.
    """
    return lax.psum_scatter(x, MP, scatter_dimension=1, tiled=True) if tokens_split else lax.psum(x, MP)


def vary(x: Array) -> Array:
    """Marks a replicated value as varying over mp, for use on this shard's tokens; its gradient is one all-reduce."""
    varies = not _is_sharded() or MP in jax.typeof(x).manual_axis_type.varying
    return x if varies else lax.pcast(x, MP, to="varying")


def gather_last(x: Array, tokens_split: bool = False) -> Array:
    """Gathers the last axis from all shards' slices; backward, each shard keeps its slice.

    With `tokens_split`, each shard gathers it only for its own tokens: an all-to-all each way.
    """
    if tokens_split:
        return lax.all_to_all(x, MP, split_axis=1, concat_axis=x.ndim - 1, tiled=True)
    to = "invarying" if _is_sharded() else "varying"
    return lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True, to=to)


def _is_sharded() -> bool:
    """Returns whether `mp` is a mesh axis under shard_map; an initialisation has a vmap of size 1 instead."""
    return MP in jax.sharding.get_abstract_mesh().manual_axes
