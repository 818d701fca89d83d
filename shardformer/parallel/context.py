"""Rows whose tokens are split over `cp`, in zig-zag order: every shard has the same causal work. Shard view.

A row has 2 * cp chunks. Shard s has chunk s and its mirror image, chunk 2 * cp - 1 - s:

    cp=4     chunk  0  1  2  3  4  5  6  7
             shard  0  1  2  3  3  2  1  0

The slots of a cache are split in order: shard s has the s-th part of them. One shard stores a new token. Every shard
attends to its slots; a maximum and two sums over `cp` join the results. A chunk of new tokens is split as a row is;
attention gathers it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config.names import CP
from shardformer.kernels.attention import SLOTS, Attention, AttentionOptions, Cache, take_slots


@dataclasses.dataclass(frozen=True)
class SplitContext(Attention):
    """The common part of attention to rows that are split over `cp`: the order of tokens, and a split cache."""

    def rows_of(self, tokens: int) -> int:
        return tokens * lax.axis_size(CP)

    def positions(self, tokens: int) -> Array:
        return local_positions(self.rows_of(tokens), lax.axis_size(CP))

    def take_tokens(self, x_BT: Array) -> Array:
        return take(x_BT, lax.axis_index(CP), lax.axis_size(CP))

    def take_batch(self, batch: dict) -> dict:
        def is_split(name, x):
            return x.ndim > 1 and name != "documents"

        return {name: self.take_tokens(x) if is_split(name, x) else x for name, x in batch.items()}

    def join_rows(self, tree):
        def join(x_Bt):
            return to_rows(lax.all_gather(x_Bt, CP, axis=1, tiled=True, to="invarying"), 1)

        return jax.tree.map(join, tree)

    def take_token(self, x_BTD: Array, position: Array) -> Array:
        is_it_t = self.positions(x_BTD.shape[1]) == position
        return lax.psum(jnp.where(is_it_t[None, :, None], x_BTD, 0).sum(1, keepdims=True), CP)

    def local_slots(self, count: int) -> Array:
        slots = jnp.arange(count)
        return lax.axis_index(CP) * count + slots

    def align(self, cache, slots: int, length: Array, end: Array):
        """Keeps complete rows only while their layer is redistributed."""
        cp = lax.axis_size(CP)
        local = -(-slots // cp)
        token_S = length - 1 - (end - 1 - self.local_slots(local)) % (local * cp)  # below 0 in empty slots
        return take_slots(gather(cache, SLOTS), token_S)

    def attend_to_cache(
        self, q_BThK: Array, k_BTgK: Array, v_BTgK: Array | None, cache: Cache, options: AttentionOptions
    ) -> tuple[Array, Cache]:
        """Returns weighted values for this shard's tokens of a chunk, or for a single token, which all shards have.

        Every shard attends to its slots with the complete chunk.
        """
        if options.stored is None:
            return super().attend_to_cache(q_BThK, k_BTgK, v_BTgK, cache, options)
        q_BThK, k_BTgK, v_BTgK = gather((q_BThK, k_BTgK, v_BTgK), 1)
        options = options._replace(position_T=gather(options.position_T, 0))
        values_BThK, cache = super().attend_to_cache(q_BThK, k_BTgK, v_BTgK, cache, options)
        return self.take_tokens(values_BThK), cache

    def put(self, cached_BgSK: Array, new_B1gK: Array, slot: Array | int) -> Array:
        new_Bg1K = jnp.swapaxes(new_B1gK, 1, 2)
        count = cached_BgSK.shape[SLOTS]
        local = slot - lax.axis_index(CP) * count
        slot = jnp.clip(local, 0, count - 1)
        present = lax.dynamic_slice_in_dim(cached_BgSK, slot, 1, axis=SLOTS)
        new_Bg1K = jnp.where(local == slot, new_Bg1K, present)
        return lax.dynamic_update_slice_in_dim(cached_BgSK, new_Bg1K, slot, axis=SLOTS)

    def weigh_values(self, logits_BgrS: Array, v_BgSK: Array, sink_1gr1: Array | None = None) -> Array:
        """Returns values_BgrK weighted by the softmax over the slots of all shards."""
        largest_Bgr1 = lax.pmax(logits_BgrS.max(-1, keepdims=True), CP)
        weights_BgrS = jnp.exp(logits_BgrS - largest_Bgr1)
        weighed = jnp.einsum(
            "bgrs,bgsk->bgrk", weights_BgrS.astype(v_BgSK.dtype), v_BgSK, preferred_element_type=jnp.float32
        )
        values_BgrK, total_Bgr1 = lax.psum((weighed, weights_BgrS.sum(-1, keepdims=True)), CP)
        if sink_1gr1 is not None:  # after the sum, as all shards have it
            total_Bgr1 = total_Bgr1 + jnp.exp(sink_1gr1 - largest_Bgr1)
        return (values_BgrK / total_Bgr1).astype(v_BgSK.dtype)


def positions(shard: Array | int, cp: int, tokens: int) -> Array:
    """Returns the positions in the row, [tokens / cp], of a shard's tokens; also in other units than tokens."""
    chunk = tokens // (2 * cp)
    inside = jnp.arange(chunk)
    return jnp.concatenate([shard * chunk + inside, (2 * cp - 1 - shard) * chunk + inside])


def local_positions(tokens: int, cp: int) -> Array:
    """Returns the positions of this shard's tokens in a row of `tokens` tokens."""
    return positions(lax.axis_index(CP), cp, tokens)


def take(x_BT: Array, shard: Array, cp: int) -> Array:
    """Returns a shard's tokens of complete rows."""
    chunk = x_BT.shape[1] // (2 * cp)
    chunks = [lax.dynamic_slice_in_dim(x_BT, n * chunk, chunk, axis=1) for n in (shard, 2 * cp - 1 - shard)]
    return jnp.concatenate(chunks, axis=1)


def to_rows(x: Array, axis: int) -> Array:
    """Returns complete rows from the tokens of all shards, one shard after the other, along `axis`."""
    cp = lax.axis_size(CP)
    parts = _split(x, axis, (cp, 2))
    first, mirrored = (lax.index_in_dim(parts, half, axis + 1, keepdims=False) for half in (0, 1))
    return _merge(jnp.concatenate([first, lax.rev(mirrored, (axis,))], axis), axis)


def to_shards(x: Array, axis: int) -> Array:
    """Inverts `to_rows`."""
    cp = lax.axis_size(CP)
    parts = _split(x, axis, (2, cp))
    first, mirrored = (lax.index_in_dim(parts, half, axis, keepdims=False) for half in (0, 1))
    return _merge(_merge(jnp.stack([first, lax.rev(mirrored, (axis,))], axis + 1), axis), axis)


def gather(tree, axis: int):
    """Returns complete rows, in order, of arrays of which each shard has its tokens."""
    return jax.tree.map(lambda x: to_rows(lax.all_gather(x, CP, axis=axis, tiled=True), axis), tree)


def _split(x: Array, axis: int, parts: tuple[int, int]) -> Array:
    return x.reshape(*x.shape[:axis], *parts, -1, *x.shape[axis + 1 :])


def _merge(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
