"""Key/value heads that two or more shards of the model share, because there are fewer heads than shards.

Their parameters are replicated over mp. Each shard slices the columns of the head that its query heads read.
"""

import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.config.names import LAYERS, MP, OF_KEY_VALUE_HEADS
from shardformer.parallel import collectives


def select_head(params: dict, config: Config) -> dict:
    """Returns one layer's parameters with only this shard's key/value head."""

    def take(name: str, p: Array) -> Array:
        return _take_columns(p, config.model.key_value_heads) if name in OF_KEY_VALUE_HEADS else p

    return params | {LAYERS: {name: take(name, p) for name, p in params[LAYERS].items()}}


def _take_columns(p: Array, heads: int) -> Array:
    """Returns the columns of this shard's head; their gradients are summed over mp in float32."""
    size = p.shape[-1] // heads
    head = collectives.index(MP) * heads // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(collectives.vary_over_mp(p.astype(jnp.float32)), head * size, size, axis=p.ndim - 1)
