"""A cache of keys and values whose slots are split over `cp`: shard s holds the s-th part of them. Shard view.

One shard stores a new token. Every shard attends to its own slots; a maximum and two sums over `cp` join the results.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config.names import CP
from shardformer.context import zigzag

SLOTS = 2  # the axis of BgSK, and of the tokens before they have slots


def own_slots(count: int, cp: int) -> Array:
    """Returns the numbers of this shard's `count` slots."""
    slots = jnp.arange(count)
    return slots if cp == 1 else lax.axis_index(CP) * count + slots


def align(cache, slots: int, length: Array, end: Array, cp: int):
    """Returns this shard's slots of one row whose last token is stored just before slot `end`.

    `cache` has the keys and values x_1gtK of this shard's tokens. Only while their layer is redistributed does a shard
    hold those of the complete row.
    """
    own = -(-slots // cp)
    token_S = length - 1 - (end - 1 - own_slots(own, cp)) % (own * cp)  # below 0 in empty slots
    rows = zigzag.gather(cache, SLOTS) if cp > 1 else cache
    return jax.tree.map(lambda x_1gTK: jnp.take(x_1gTK[0], token_S, axis=1, mode="clip"), rows)


def put(cached_BgSK: Array, new_B1gK: Array, slot: Array | int, cp: int) -> Array:
    """Writes one token's heads into a slot, which one shard holds."""
    new_Bg1K = jnp.swapaxes(new_B1gK, 1, 2)
    if cp > 1:
        own = cached_BgSK.shape[SLOTS]
        place = slot - lax.axis_index(CP) * own
        slot = jnp.clip(place, 0, own - 1)
        present = lax.dynamic_slice_in_dim(cached_BgSK, slot, 1, axis=SLOTS)
        new_Bg1K = jnp.where(place == slot, new_Bg1K, present)
    return lax.dynamic_update_slice_in_dim(cached_BgSK, new_Bg1K, slot, axis=SLOTS)


def weigh_values(logits_BgrS: Array, v_BgSK: Array, cp: int) -> Array:
    """Returns values_BgrK weighted by the softmax over the slots of all shards."""
    if cp == 1:
        weights_BgrS = jax.nn.softmax(logits_BgrS, axis=-1)
        return jnp.einsum("bgrs,bgsk->bgrk", weights_BgrS.astype(v_BgSK.dtype), v_BgSK)
    weights_BgrS = jnp.exp(logits_BgrS - lax.pmax(logits_BgrS.max(-1, keepdims=True), CP))
    weighed = jnp.einsum(
        "bgrs,bgsk->bgrk", weights_BgrS.astype(v_BgSK.dtype), v_BgSK, preferred_element_type=jnp.float32
    )
    values_BgrK, total_Bgr = lax.psum((weighed, weights_BgrS.sum(-1)), CP)
    return (values_BgrK / total_Bgr[..., None]).astype(v_BgSK.dtype)
