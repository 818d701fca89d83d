"""The ids of the N tokens before each token, for `previous_tokens=N`, and the sum of their vectors.

When decoding, one more cache behind those of the layers has the ids of the last tokens. They are stored as the keys of
a layer whose window reaches these tokens, and move with their row as keys do.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config.names import CP
from shardformer.kernels.attention import SLOTS, Attention, AttentionOptions, Cache
from shardformer.shards.parameters import unstack, weight

if TYPE_CHECKING:
    from shardformer.shards.embedding import EmbeddingShard

NO_ROW = -1  # of any shard


def look_up(embed: "EmbeddingShard", before: Sequence[Array], position_BT: Array) -> Array:
    """Returns this shard's part of the sum of the vectors of the tokens `before`, which lists ids_BT by distance.

    Tokens before position 0 add nothing.
    """
    c = embed.config.model
    tables_nvD = weight("previous", [c.previous_tokens, collectives.local(c.padded_vocab), c.table_size], c.table_std)
    ids = [jnp.where(position_BT >= distance, ids_BT, NO_ROW) for distance, ids_BT in enumerate(before, 1)]
    return functools.reduce(jnp.add, map(embed.masked_lookup, ids, unstack(tables_nvD, c.previous_tokens)))


class PreviousTokens:
    """The methods that find the ids of the `count` tokens before each token, the nearest first."""

    def __init__(self, count: int):
        self._count = count

    def list_in_rows(self, attention: Attention, tokens_BT: Array) -> list[Array]:
        """Returns the ids_BT before each of this shard's tokens, by distance."""
        return _list_before(attention, tokens_BT, self._count)

    def list_before_next(self, attention: Attention, tokens_BT: Array) -> list[Array]:
        """Returns the ids_BT before the token that follows each of this shard's tokens, by distance."""
        return [tokens_BT, *_list_before(attention, tokens_BT, self._count - 1)]

    @staticmethod
    def make_cache(tokens_BS: Array, shards: int = 1) -> Cache:
        """Returns the ids in the form of keys, with all of them for each of `shards` shards of the model."""
        rows, slots = tokens_BS.shape
        return Cache(jnp.broadcast_to(tokens_BS[:, None, :, None], (rows, shards, slots, 1)))

    def extend(
        self, attention: Attention, tokens_BT: Array, options: AttentionOptions, cache: Cache
    ) -> tuple[list[Array], Cache]:
        """Returns the ids before each of this shard's new tokens, by distance, and the cache with the new tokens.

        `tokens_BT` has all new tokens on each shard of the context.
        """
        n, T = self._count, tokens_BT.shape[1]
        new_BT = collectives.vary_over_mp(tokens_BT)
        stored_Bn = _read_slots(attention, cache.k_BhSK, options.slot - jnp.arange(n, 0, -1, dtype=jnp.int32))
        known_BU = jnp.concatenate([stored_Bn, new_BT], axis=1)
        before = [known_BU[:, n - distance : n - distance + T] for distance in range(1, n + 1)]
        if options.stored is not None:
            before = jax.tree.map(attention.take_tokens, before)
        return before, Cache(attention.store(cache.k_BhSK, new_BT[..., None, None], options))


def _list_before(attention: Attention, tokens_BT: Array, count: int) -> list[Array]:
    rows_BT = attention.join_rows(tokens_BT)
    return [attention.take_tokens(jnp.roll(rows_BT, distance, axis=1)) for distance in range(1, count + 1)]


def _read_slots(attention: Attention, cached_B1S1: Array, slot_n: Array) -> Array:
    """Returns the ids_Bn in slots, the same on every shard of the context."""
    count = cached_B1S1.shape[SLOTS]
    is_it_Sn = attention.local_slots(count)[:, None] == slot_n[None] % attention.rows_of(count)
    ids_Bn = jnp.where(is_it_Sn[None, None], cached_B1S1, 0).sum(SLOTS, dtype=cached_B1S1.dtype)[:, 0]
    return lax.psum(ids_Bn, CP) if attention.rows_of(1) > 1 else ids_Bn
