"""The tokens before each token, of which `previous_tokens` adds vectors to the token's.

When decoding, a further cache behind those of the layers has the ids of tokens. They are stored as the keys of a layer
whose window reaches these tokens, and move with their row as keys do.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config.names import CP
from shardformer.kernels.attention import SLOTS, Attention, AttentionOptions, Cache
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.parameters import weight

NO_ROW = -1  # of any shard


def look_up(before: Sequence[Array], embed: EmbeddingShard, position_BT: Array) -> Array:
    """Returns the sum of the vectors of the tokens `before` each, by distance from 1 on: this shard's part of it.

    Those beyond position 0 are ignored.
    """
    c = embed.config.model
    tables_nvD = weight("previous", [c.previous_tokens, collectives.local(c.padded_vocab), c.table_size], c.table_std)
    ids = [jnp.where(position_BT >= distance, ids_BT, NO_ROW) for distance, ids_BT in enumerate(before, 1)]
    return functools.reduce(jnp.add, map(embed.masked_lookup, ids, tables_nvD))


class PreviousTokens:
    """The functions that find the `count` tokens before each; their results are what the embedding adds."""

    def __init__(self, count: int):
        self._count = count

    def list_in_rows(self, attention: Attention, tokens_BT: Array) -> list[Array]:
        """Returns the tokens before each of this shard's tokens, the nearest first."""
        rows_BT = attention.join_rows(tokens_BT)
        distances = range(1, self._count + 1)
        return [attention.take_tokens(jnp.roll(rows_BT, distance, axis=1)) for distance in distances]

    def find_in_rows(self, attention: Attention, tokens_BT: Array) -> Callable:
        """Returns the function that looks up the tokens before each of this shard's tokens."""
        return functools.partial(look_up, self.list_in_rows(attention, tokens_BT))

    def find_before_next(self, attention: Attention, tokens_BT: Array) -> Callable:
        """Returns that of the tokens which follow each of these."""
        return functools.partial(look_up, [tokens_BT, *self.list_in_rows(attention, tokens_BT)][: self._count])

    def make_cache(self, tokens_BT: Array) -> Cache:
        """Returns the ids in the form of keys, all of them on each shard of the model."""
        return Cache(tokens_BT[:, None, :, None])

    def extend(
        self, attention: Attention, tokens_BT: Array, options: AttentionOptions, cache: Cache
    ) -> tuple[Callable, Cache]:
        """Returns the function that looks up the tokens before each of the new ones, and the cache with these in it."""
        before, cache = self.read(attention, tokens_BT, options, cache)
        if options.stored is not None:
            before = jax.tree.map(attention.take_tokens, before)
        return functools.partial(look_up, before), cache

    def read(
        self, attention: Attention, tokens_BT: Array, options: AttentionOptions, cache: Cache
    ) -> tuple[list[Array], Cache]:
        """Returns the tokens before each of the new ones, and the cache with these in it.

        Each shard of the context has all of the new tokens.
        """
        n, T = self._count, tokens_BT.shape[1]
        new_BT11 = collectives.vary_over_mp(tokens_BT)[..., None, None]
        stored = [_read_slot(attention, cache.k_BhSK, options.slot - distance) for distance in range(n, 0, -1)]
        known_BU = jnp.concatenate([*stored, new_BT11], axis=1)[..., 0, 0]
        before = [known_BU[:, n - distance : n - distance + T] for distance in range(1, n + 1)]
        return before, Cache(attention.store(cache.k_BhSK, new_BT11, options))


def _read_slot(attention: Attention, cached_B1S1: Array, slot: Array | int) -> Array:
    """Returns the ids [B, 1, 1, 1] in a slot, the same on every shard of the context."""
    count = cached_B1S1.shape[SLOTS]
    is_it_S = attention.local_slots(count) == slot % attention.rows_of(count)
    id_B111 = jnp.where(is_it_S[:, None], cached_B1S1, 0).sum(SLOTS, keepdims=True, dtype=cached_B1S1.dtype)
    return lax.psum(id_B111, CP) if attention.rows_of(1) > 1 else id_B111
