"""The collectives over `mp`, as a Megatron reader knows them."""

import jax
from jax import lax

MP = "mp"


def local(size: int) -> int:
    """This shard's part of a global size."""
    return size // lax.axis_size(MP)


def offset(local_size: int) -> jax.Array:
    """Where this shard's slice begins in the global axis."""
    return lax.axis_index(MP) * local_size


def fan_out(x):
    """Megatron's f: a replicated activation enters split work. Identity forward, one all-reduce backward.

    Without it, every product that follows would all-reduce its own part of the gradient.
    """
    return lax.pcast(x, MP, to="varying") if _manual() else x


def reduce(x):
    """Megatron's g: the partial sums of split work become whole. One all-reduce forward, identity backward."""
    return lax.psum(x, MP)


def gather_last(x):
    """The whole last axis from every shard's slice of it; backward, each shard keeps its slice."""
    to = "invarying" if _manual() else "varying"
    return lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True, to=to)


def _manual() -> bool:
    """Whether `mp` is a mesh axis under shard_map, and not the size-1 vmap of an initialisation."""
    return MP in jax.sharding.get_abstract_mesh().manual_axes
