"""Causal attention of this shard's heads: what every method shares, the plain method, and attention to a cache.

A method is an object with `attend`. `Plain` (here), `Blocks` and `Kernel` see complete rows. `Ring` and `Gathered`
see this shard's tokens of rows that are split over `cp`, and replace what depends on the order of the tokens.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

ATTENTION_WEIGHTS = "attention weights"  # names by which a caller's jax.checkpoint may keep activations
ATTENDED = "attended values"
TPU_BLOCK = 128  # tokens: the least block of a kernel of a TPU
MASKED = np.float32(-1e30)
SLOTS = 2  # the axis of slots in a cache BgSK, and of tokens before they have slots


class Cache(NamedTuple):
    """The keys and values of one layer in the layout that decoding reads: each head's are contiguous.

    A ring of S slots: a new token replaces the one S tokens before it, which no window of at most S tokens reaches.
    With `previous_tokens`, one more cache has the ids of tokens [B, h, S, 1] as its keys.
    """

    k_BhSK: Array
    v_BhSK: Array | None = None  # None: the keys are the values too, as latents are


class AttentionOptions(NamedTuple):
    """The inputs of attention besides queries, keys and values."""

    position_T: Array  # of the queries
    frequency: Array | np.ndarray | None = None  # of rotary positions
    cap: float | None = None  # bound of the logits
    bias: Array | None = None  # [1, h, T, T]; [h, S] by distance for blocks and caches
    documents_BT: Array | None = None  # each token's document; tokens of other documents are masked
    window: Array | int | None = None  # tokens in range, the query's included; None: all
    dropout: Any = None  # the masks of the weights: a `Dropout`
    rotary_factor: Array | float = 1.0  # of rotated queries and keys
    slot: Array | int = 0  # number of the first new token; its slot in a cache of S slots is slot % S
    stored: Array | None = None  # new tokens that are stored, the others are padding; None: there is one, not padded
    head_size: int | None = None  # whose root divides the logits of a cache; None: that of its keys
    sink_1h11: Array | None = None  # each head's logit that only the denominators of its softmaxes have
    chunk: Array | int | None = None  # tokens of a chunk, of which a query sees only its own; None: no chunks
    rotates: Array | bool = True  # the layer rotates its queries and keys


@dataclasses.dataclass(frozen=True)
class Attention:
    """The common part of all methods, for shards that have complete rows."""

    bias_by_distance: ClassVar[bool] = False  # a bias is [h, S] by distance instead of [1, h, T, T]
    uses_kernel: ClassVar[bool] = False  # a device's kernel keeps no weights, and cannot be traced elsewhere

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        """Returns weighted values_BThK; logits and softmax are in float32.

        Grouped-query attention: g key/value heads, each shared by r = h / g query heads.
        """
        raise NotImplementedError

    def attend_to_cache(
        self, q_BThK: Array, k_BTgK: Array, v_BTgK: Array | None, cache: Cache, options: AttentionOptions
    ) -> tuple[Array, Cache]:
        """Returns weighted values_BThK for the new tokens of each row, and the cache with these tokens in it."""
        (T, h), (B, g, S, K) = q_BThK.shape[1:3], cache.k_BhSK.shape
        total = self.rows_of(S)
        cache = jax.tree.map(lambda cached, new: self.store(cached, new, options), cache, Cache(k_BTgK, v_BTgK))
        k_BgSK, v_BgSK = cache.k_BhSK, cache.k_BhSK if cache.v_BhSK is None else cache.v_BhSK
        slot_T = options.slot + jnp.arange(T)
        distance_TS = (slot_T[:, None] - self.local_slots(S)[None]) % total  # of each slot from each new token
        q_BgqK = jnp.moveaxis(q_BThK.reshape(B, T, g, h // g, K), 1, 3).reshape(B, g, -1, K)
        logits_BgqS = jnp.einsum("bgqk,bgsk->bgqs", q_BgqK, k_BgSK, preferred_element_type=jnp.float32)
        logits_BhTS = (logits_BgqS * np.float32(1 / math.sqrt(options.head_size or K))).reshape(B, h, T, S)
        if options.bias is not None:
            logits_BhTS = logits_BhTS + options.bias[:, distance_TS][None]
        logits_BhTS = soft_cap(logits_BhTS, options.cap)
        visible_TS = distance_TS <= options.position_T[:, None]  # the other slots are empty
        if options.window is not None:
            visible_TS &= distance_TS < options.window
        if options.chunk is not None:
            visible_TS &= distance_TS <= options.position_T[:, None] % options.chunk
        logits_BhTS = jnp.where(visible_TS[None, None], logits_BhTS, -1e30)
        sink_1gq1 = None if options.sink_1h11 is None else jnp.repeat(options.sink_1h11, T, axis=2).reshape(1, g, -1, 1)
        values_BgqK = self.weigh_values(logits_BhTS.reshape(B, g, -1, S), v_BgSK, sink_1gq1)
        return jnp.moveaxis(values_BgqK.reshape(B, h, T, K), 1, 2), cache

    def store(self, cached_BgSK: Array, new_BTgK: Array, options: AttentionOptions) -> Array:
        """Returns a cache with the heads of the new tokens in it, from the slot of the first on."""
        S, T = cached_BgSK.shape[SLOTS], new_BTgK.shape[1]
        total = self.rows_of(S)
        if options.stored is None:
            return self.put(cached_BgSK, new_BTgK, options.slot % total)
        number_S = (self.local_slots(S) - options.slot) % total  # of the new token that belongs into each slot
        new_BgSK = jnp.take(jnp.swapaxes(new_BTgK, 1, 2), jnp.minimum(number_S, T - 1), axis=SLOTS)
        return jnp.where((number_S < options.stored)[None, None, :, None], new_BgSK, cached_BgSK)

    # The tokens of complete rows: `SplitContext` replaces these.

    def rows_of(self, tokens: int) -> int:
        """Returns the tokens of a row of which each shard has `tokens` tokens; likewise for slots."""
        return tokens

    def positions(self, tokens: int) -> Array:
        """Returns the positions in the row of this shard's `tokens` tokens."""
        return jnp.arange(tokens)

    def take_tokens(self, x_BT: Array) -> Array:
        """Returns this shard's tokens of complete rows."""
        return x_BT

    def take_batch(self, batch: dict) -> dict:
        """Returns this shard's tokens of a batch; `documents`, which attention needs, stay complete."""
        return batch

    def join_rows(self, tree):
        """Returns complete rows of arrays [B, t, ...], the same on every shard."""
        return tree

    def take_token(self, x_BTD: Array, position: Array) -> Array:
        """Returns the row's token x_B1D at a position, the same on every shard."""
        return lax.dynamic_slice_in_dim(x_BTD, position, 1, axis=1)

    def local_slots(self, count: int) -> Array:
        """Returns the indices of this shard's `count` slots."""
        return jnp.arange(count)

    def align(self, cache, slots: int, length: Array, end: Array):
        """Returns this shard's slots of one row whose last token is stored just before slot `end`.

        `cache` has the keys and values x_1gtK of this shard's tokens.
        """
        token_S = length - 1 - (end - 1 - self.local_slots(slots)) % slots  # below 0 in empty slots
        return take_slots(cache, token_S)

    def put(self, cached_BgSK: Array, new_B1gK: Array, slot: Array | int) -> Array:
        """Writes one token's heads into a slot."""
        return put_in_slot(cached_BgSK, jnp.swapaxes(new_B1gK, 1, 2), slot)

    def weigh_values(self, logits_BgrS: Array, v_BgSK: Array, sink_1gr1: Array | None = None) -> Array:
        """Returns values_BgrK weighted by the softmax over the slots."""
        weights_BgrS = softmax_with_sink(logits_BgrS, sink_1gr1)
        return jnp.einsum("bgrs,bgsk->bgrk", weights_BgrS.astype(v_BgSK.dtype), v_BgSK)


@dataclasses.dataclass(frozen=True)
class Plain(Attention):
    """All pairs of tokens at once, or in groups of queries, each of which skips the keys after its last query."""

    groups: int = 1

    def __str__(self) -> str:
        return f"plain, {self.groups} groups of queries" if self.groups > 1 else "plain"

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        if self.groups > 1:
            return checkpoint_name(self._attend_in_groups(q_BThK, k_BSgK, v_BSgK, options), ATTENDED)
        weights_BhTS = softmax_with_sink(_masked_logits(q_BThK, k_BSgK, options), options.sink_1h11)
        weights_BhTS = checkpoint_name(weights_BhTS, ATTENTION_WEIGHTS)
        if options.dropout:
            weights_BhTS = options.dropout.at(0).heads(weights_BhTS)
        return checkpoint_name(_weigh_values(weights_BhTS.astype(q_BThK.dtype), v_BSgK), ATTENDED)

    def _attend_in_groups(self, q_BThK, k_BSgK, v_BSgK, options: AttentionOptions):
        T, values, bias, documents = q_BThK.shape[1], [], options.bias, options.documents_BT
        size = -(-T // self.groups)
        for first in range(0, T, size):
            end = min(first + size, T)
            local = options._replace(
                bias=None if bias is None else bias[:, :, first:end, :end],
                documents_BT=None if documents is None else documents[:, :end],
            )
            logits_Bhts = _masked_logits(q_BThK[:, first:end], k_BSgK[:, :end], local)
            if options.sink_1h11 is None:
                weights_Bhts = softmax(logits_Bhts)
            else:
                weights_Bhts = checkpoint_name(softmax_with_sink(logits_Bhts, options.sink_1h11), ATTENTION_WEIGHTS)
            if options.dropout:
                weights_Bhts = options.dropout.at(0).heads(weights_Bhts, first, T)
            values.append(_weigh_values(weights_Bhts.astype(q_BThK.dtype), v_BSgK[:, :end]))
        return jnp.concatenate(values, axis=1)


@jax.custom_batching.custom_vmap
def put_in_slot(cached_BgSK: Array, new_Bg1K: Array, slot: Array) -> Array:
    """Returns a cache with one token's heads in a slot, in the form that XLA computes in place in a loop over tokens.

    The loop carries `drop_single_axes(caches)`. For each axis of size 1, XLA would copy the caches for every token.
    """
    cached, new = drop_single_axes((cached_BgSK, new_Bg1K))
    return lax.dynamic_update_slice_in_dim(cached, new, slot, axis=cached.ndim - 2).reshape(cached_BgSK.shape)


@put_in_slot.def_vmap
def _put_in_slot_of_rows(rows: int, batched: list[bool], cached_RBgSK: Array, new_RBg1K: Array, slot: Array):
    """Writes all rows at once if they share the slot: JAX would make a scatter, before which XLA copies the cache."""
    if rows == 1 and batched[2]:
        batched, slot = [*batched[:2], False], slot[0]
    if batched == [True, True, False]:
        cached, new = (x.reshape(-1, *x.shape[2:]) for x in (cached_RBgSK, new_RBg1K))
        return put_in_slot(cached, new, slot).reshape(cached_RBgSK.shape), True
    put = functools.partial(lax.dynamic_update_slice_in_dim, axis=SLOTS)
    return jax.vmap(put, [0 if each else None for each in batched])(cached_RBgSK, new_RBg1K, slot), True


def drop_single_axes(caches: Any) -> Any:
    """Returns a tree of caches [B, g, S, K] without those of their first two axes that have size 1."""
    return jax.tree.map(lambda x: x.reshape(*(size for size in x.shape[:SLOTS] if size > 1), *x.shape[SLOTS:]), caches)


def take_slots(cache, token_S: Array):
    """Returns the keys and values x_gSK of one complete row x_1gTK, token `token_S` in each slot."""
    return jax.tree.map(lambda x_1gTK: jnp.take(x_1gTK[0], token_S, axis=1, mode="clip"), cache)


def soft_cap(logits: Array, cap: float | None) -> Array:
    """Returns logits bounded by cap * tanh(logits / cap), as in Gemma 2; without a cap, the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@jax.custom_vjp
def softmax(logits: Array) -> Array:
    """Returns the softmax over the last axis, with a gradient that needs only this result.

    JAX's keeps the numerator and the denominator and divides twice. With it, attention in groups over 256 tokens and
    its gradient take 1.13 times as long on a CPU. The result has the name ATTENTION_WEIGHTS when it is differentiated.
    """
    return jax.nn.softmax(logits, axis=-1)


def _forward(logits):
    weights = checkpoint_name(jax.nn.softmax(logits, axis=-1), ATTENTION_WEIGHTS)
    return weights, weights


def _backward(weights, d_weights):
    return (weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)),)


softmax.defvjp(_forward, _backward)


def softmax_with_sink(logits: Array, sink: Array | None) -> Array:
    """Returns the softmax over the last axis, whose denominator has one more logit; without a sink, the softmax.

    `sink` broadcasts to logits[..., :1]. The weights add up to less than 1.
    """
    if sink is None:
        return jax.nn.softmax(logits, axis=-1)
    largest = lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), sink))
    weights = jnp.exp(logits - largest)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - largest))


def _masked_logits(q_BThK, k_BSgK, options: AttentionOptions):
    """Returns logits_BhTS of the last T of S tokens, in float32; very low ones for masked tokens."""
    T, S = q_BThK.shape[1], k_BSgK.shape[1]
    logits_BhTS = _multiply_with_keys(q_BThK, k_BSgK) * np.float32(1 / math.sqrt(q_BThK.shape[-1]))
    if options.bias is not None:
        logits_BhTS = logits_BhTS + options.bias
    logits_BhTS = soft_cap(logits_BhTS, options.cap)
    distance_TS = options.position_T[S - T : S, None] - options.position_T[None, :S]
    in_range_TS = distance_TS >= 0
    if options.window is not None:
        in_range_TS &= distance_TS < options.window
    if options.chunk is not None:
        in_range_TS &= distance_TS <= options.position_T[S - T : S, None] % options.chunk
    visible_BhTS = in_range_TS[None, None]
    if options.documents_BT is not None:
        document_BT = options.documents_BT
        visible_BhTS &= (document_BT[:, S - T :, None] == document_BT[:, None, :])[:, None]
    return jnp.where(visible_BhTS, logits_BhTS, -1e30)


def _multiply_with_keys(q_BThK, k_BSgK):
    """Returns the products of all pairs of tokens, [B, h, T, S], in float32."""
    B, T, h, K = q_BThK.shape
    S, g = k_BSgK.shape[1:3]
    if g == h:
        return jnp.einsum("bthk,bshk->bhts", q_BThK, k_BSgK, preferred_element_type=jnp.float32)
    q_BTgrK = q_BThK.reshape(B, T, g, h // g, K)
    products_BgrTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTgrK, k_BSgK, preferred_element_type=jnp.float32)
    return products_BgrTS.reshape(B, h, T, S)


def _weigh_values(weights_BhTS, v_BSgK):
    """Returns weighted sums of the values, [B, T, h, K]."""
    B, h, T, S = weights_BhTS.shape
    g, K = v_BSgK.shape[2:]
    if g == h:
        return jnp.einsum("bhts,bshk->bthk", weights_BhTS, v_BSgK)
    weights_BgrTS = weights_BhTS.reshape(B, g, h // g, T, S)
    return jnp.einsum("bgrts,bsgk->btgrk", weights_BgrTS, v_BSgK).reshape(B, T, h, K)
