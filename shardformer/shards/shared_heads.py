"""Key/value heads that several shards of the model share, because there are fewer heads than shards.

Their parameters are replicated over mp. Each shard takes the columns of the head that its query heads read.
"""

import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.config.names import LAYERS, MP
from shardformer.kernels import named_axes
from shardformer.shards import axes
from shardformer.shards.parameters import LORA_OUT

LEAVES = {f"{matrix}{kind}" for matrix in ("k", "v") for kind in ("", "_bias", "_scale", LORA_OUT)}


def is_of_shared_heads(name: str) -> bool:
    """Returns whether a parameter of this full name has the columns of key/value heads."""
    module, _, leaf = name.rpartition("/")
    return module == LAYERS and leaf in LEAVES


def take_own_head(params: dict, config: Config) -> dict:
    """Returns one layer's parameters with only this shard's key/value head, if shards share heads."""
    if not config.shares_kv_heads:
        return params

    def take(name: str, p: Array) -> Array:
        return _take_columns(p, config.key_value_heads) if name in LEAVES else p

    own = {name: take(name, p) for name, p in params[LAYERS].items()}
    return params | {LAYERS: own}


def _take_columns(p: Array, heads: int) -> Array:
    """Returns the columns of this shard's head; their gradients are summed over mp in float32."""
    size = p.shape[-1] // heads
    head = named_axes.index(MP) * heads // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(axes.vary(p.astype(jnp.float32)), head * size, size, axis=p.ndim - 1)
