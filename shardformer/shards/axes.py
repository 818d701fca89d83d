"""The collectives over `mp`, named as a Megatron reader knows them.

`tokens_split` is Megatron's sequence parallelism: between the blocks, each shard of the model holds its part of every
sequence, x_BtD; without it, all shards hold the same x_BTD. Activations are summed over `mp` in their own type: in
bfloat16 over 8 shards that costs at most 0.03% of a gradient.
"""

from jax import Array, lax

from shardformer.config.names import MP
from shardformer.kernels import named_axes
from shardformer.kernels.varying import varying_axes


def local(size: int) -> int:
    """Returns this shard's part of a global size."""
    return size // lax.axis_size(MP)


def offset(local_size: int) -> Array:
    """Returns the index on the global axis at which this shard's slice begins."""
    return named_axes.index(MP) * local_size


def fan_out(x: Array, tokens_split: bool = False) -> Array:
    """Passes a replicated activation to split work (Megatron's f): identity forward, one all-reduce backward.

    Without it, every product that follows would all-reduce its own part of the gradient. With `tokens_split`: an
    all-gather forward and a reduce-scatter backward.
    """
    if tokens_split and _is_split():
        return lax.all_gather(x, MP, axis=1, tiled=True)
    return named_axes.vary(x, MP)


def reduce(x: Array, tokens_split: bool = False) -> Array:
    """Adds up the partial sums of split work (Megatron's g): one all-reduce forward, identity backward.

    With `tokens_split`: a reduce-scatter forward and an all-gather backward.
    """
    if tokens_split and _is_split():
        return lax.psum_scatter(x, MP, scatter_dimension=1, tiled=True)
    return named_axes.psum(x, MP)


def vary(x: Array) -> Array:
    """Marks a replicated value as varying over mp, for use on this shard's tokens; its gradient is one all-reduce."""
    return x if MP in varying_axes(x) else named_axes.vary(x, MP)


def gather_last(x: Array, tokens_split: bool = False) -> Array:
    """Gathers the last axis from all shards' slices; backward, each shard keeps its slice.

    With `tokens_split`, each shard gathers it only for its own tokens: an all-to-all each way.
    """
    if not _is_split():
        return x
    if tokens_split:
        return lax.all_to_all(x, MP, split_axis=1, concat_axis=x.ndim - 1, tiled=True)
    return lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True, to="invarying")


def _is_split() -> bool:
    """Returns whether the model has more than one shard."""
    return lax.axis_size(MP) > 1
