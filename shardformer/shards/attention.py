"""Causal attention of this shard's heads."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shardformer.config import Config
from shardformer.context import split_cache
from shardformer.context.choice import Rates, choose_way
from shardformer.context.split_attention import attend_in_context, choose_block
from shardformer.errors import UsageError
from shardformer.kernels.blockwise_attention import Sight, block_size
from shardformer.kernels.fused_attention import Demands, Hardware, Reach, attend_by_kernel, find_obstacle
from shardformer.kernels.soft_cap import soft_cap
from shardformer.kernels.softmax import softmax
from shardformer.kernels.varying import vary_like
from shardformer.shards.dropout import Dropout
from shardformer.shards.positions import attention_window, rotary_frequencies
from shardformer.shards.remat import name_attended, name_weights


class Cache(NamedTuple):
    """The keys and values of one layer in the layout that decoding reads: each head's are contiguous.

    A ring of S slots: a new token replaces the one S tokens before it, which no window of at most S tokens reaches.
    """

    k_BhSK: Array
    v_BhSK: Array


class Method(NamedTuple):
    """The way attention is computed: all pairs of tokens at once, unless one of these is set."""

    block: int = 0  # tokens of a block, in blockwise attention
    kernel: str = ""  # the platform whose fused kernel is used
    way: str = ""  # to the tokens of other shards, if the context is split: ring or gather
    kinds: int = 1  # layers of window_pattern, if each has its own kernel
    parts: int = 1  # groups of queries in plain attention; a group skips the keys after its last query


def choose_method(config: Config, hardware: Hardware, tokens: int, dropout: bool, documents: bool) -> Method:
    """Chooses the devices' kernel if it can do the job, else blocks from 1,024 tokens on (faster on a CPU)."""
    if config.cp > 1:
        obstacle = find_ring_obstacle(config, hardware, tokens, dropout, documents)
        if not obstacle:
            return Method(kernel=hardware.platform, way="ring")
        if config.attention == "fused":
            raise UsageError(f"attention=fused: {obstacle}; give attention=auto")
        choice = choose_way(config, Rates(hardware.flops, hardware.wire))
        return Method(block=choose_block(config, tokens), way=choice.way)
    if config.attention in ("auto", "fused"):
        obstacle = find_kernel_obstacle(config, hardware, tokens, dropout, documents)
        if not obstacle:
            return Method(kernel=hardware.platform, kinds=config.window_period)
        if config.attention == "fused":
            raise UsageError(f"attention=fused: {obstacle}; give attention=auto")
    in_blocks = config.attention == "blocks" or (config.attention == "auto" and tokens >= 1024)
    return Method(block=block_size(tokens)) if in_blocks else Method(parts=choose_parts(config, hardware, tokens))


def choose_parts(config: Config, hardware: Hardware, tokens: int) -> int:
    """Returns the groups of queries of plain attention.

    On a CPU, attention with its gradient takes 0.74 of the time in four groups at 256 tokens, 0.63 at 512, and gains
    less at 128. In bfloat16 it stays in one, so that the losses of earlier releases remain, bit for bit; with fewer
    key/value heads, because XLA would keep the weights twice.
    """
    serves = hardware.platform == "cpu" and config.dtype == "float32" and config.key_value_heads == config.heads
    return 4 if serves and tokens >= 256 else 1


def find_kernel_obstacle(config: Config, hardware: Hardware, tokens: int, dropout: bool, documents: bool) -> str:
    """Returns why these devices have no kernel for the attention of this model, or ''."""
    demands = Demands(tokens, config.head_size, config.dtype, documents, config.attention_cap)
    if obstacle := find_obstacle(hardware, demands):
        return obstacle
    if dropout:
        return "no kernel takes dropout"
    if config.biased_by_distance:
        return f"no kernel takes the bias of positions={config.positions}"
    if config.pp > 1 and config.stage_layers % config.window_period:
        stages = f"window_pattern={config.window_pattern} in stages of {config.stage_layers} layers"
        return f"no kernel takes {stages}, which must be a multiple of the pattern's {config.window_period}"
    return ""


def find_ring_obstacle(config: Config, hardware: Hardware, tokens: int, dropout: bool, documents: bool) -> str:
    """Returns why no kernel computes the turns of a ring in which each shard has `tokens` tokens, or ''."""
    if config.attention not in ("auto", "fused"):
        return f"attention={config.attention}"
    if config.context_parallel == "gather":
        return "a kernel computes the turns of a ring, got context_parallel=gather"
    if hardware.platform != "tpu":
        return "only a TPU's kernel returns the statistics that join turns"
    if config.window:
        return "a ring of kernels takes no window"
    return find_kernel_obstacle(config, hardware, tokens // 2, dropout, documents)


class AttentionContext(NamedTuple):
    """The inputs of attention beside queries, keys and values; `at_layer` sets the inputs of one layer."""

    query_T: Array  # positions of the queries
    bias: Array | None = None  # T5's relative bias [1, h, T, T]; in blocks and for a cache [h, S], by distance
    documents_BT: Array | None = None  # each token's document; tokens of others are not attended to
    method: Method = Method()
    slot: Array | int = 0  # number of a new token; its slot in a cache of S slots is slot % S
    cap: float | None = None  # bound of the logits
    window: Array | int | None = None  # tokens attended to, the own token included; None: all
    frequency: Array | np.ndarray | None = None  # of rotary positions
    cp: int = 1  # shards over which the slots of a cache are split
    kind: int | None = None  # the layer's place in window_pattern, if it is known while tracing

    def by_kind(self) -> list["AttentionContext"]:
        """Returns the context of each kind of layers that has its own kernel; of one kind only, without its place."""
        kinds = self.method.kinds
        return [self._replace(kind=kind) for kind in range(kinds)] if kinds > 1 else [self]

    def at_layer(self, config: Config, layer: Array | int) -> "AttentionContext":
        """Returns the context of one of the model's layers."""
        layer = layer if self.kind is None else self.kind
        frequency = rotary_frequencies(config, layer) if config.positions == "rotary" else None
        window = attention_window(config, layer) if config.window else None
        return self._replace(cap=config.attention_cap, window=window, frequency=frequency)


def attend(q_BThK: Array, k_BSgK: Array, v_BSgK: Array, context: AttentionContext, dropout: Dropout | None) -> Array:
    """Returns weighted values_BThK; logits and softmax are in float32.

    Grouped-query attention: g key/value heads, each shared by r = h / g query heads.
    """
    if context.method.block or context.method.way:
        return _attend_in_blocks(q_BThK, k_BSgK, v_BSgK, context, dropout)
    if context.method.kernel:
        T = q_BThK.shape[1]
        window = T if context.window is None else int(context.window)  # a kernel takes no traced window
        reach = Reach(window if window < T else None, context.cap)
        return attend_by_kernel(context.method.kernel, q_BThK, k_BSgK, v_BSgK, context.documents_BT, reach)
    if context.method.parts == 1:
        weights_BhTS = name_weights(jax.nn.softmax(_masked_logits(q_BThK, k_BSgK, context), axis=-1))
        if dropout:
            weights_BhTS = dropout.at(0).heads(weights_BhTS)
        return name_attended(_weigh_values(weights_BhTS.astype(q_BThK.dtype), v_BSgK))
    return name_attended(_attend_in_parts(q_BThK, k_BSgK, v_BSgK, context, dropout))


def _attend_in_parts(q_BThK, k_BSgK, v_BSgK, context: AttentionContext, dropout: Dropout | None):
    """Computes plain attention for one group of queries after the other, each with the keys up to its last query."""
    T, parts, bias, documents = q_BThK.shape[1], [], context.bias, context.documents_BT
    size = -(-T // context.method.parts)
    for first in range(0, T, size):
        end = min(first + size, T)
        own = context._replace(
            bias=None if bias is None else bias[:, :, first:end, :end],
            documents_BT=None if documents is None else documents[:, :end],
        )
        weights_Bhts = softmax(_masked_logits(q_BThK[:, first:end], k_BSgK[:, :end], own))
        if dropout:
            weights_Bhts = dropout.at(0).heads(weights_Bhts, first, T)
        parts.append(_weigh_values(weights_Bhts.astype(q_BThK.dtype), v_BSgK[:, :end]))
    return jnp.concatenate(parts, axis=1)


def _masked_logits(q_BThK, k_BSgK, context: AttentionContext):
    """Returns logits_BhTS of the last T of S tokens, in float32; very low ones for tokens that are not seen."""
    T, S = q_BThK.shape[1], k_BSgK.shape[1]
    logits_BhTS = _multiply_with_keys(q_BThK, k_BSgK) * np.float32(1 / math.sqrt(q_BThK.shape[-1]))
    if context.bias is not None:
        logits_BhTS = logits_BhTS + context.bias
    logits_BhTS = soft_cap(logits_BhTS, context.cap)
    distance_TS = context.query_T[S - T : S, None] - context.query_T[None, :S]
    reached_TS = distance_TS >= 0
    if context.window is not None:
        reached_TS &= distance_TS < context.window
    seen_BhTS = reached_TS[None, None]
    if context.documents_BT is not None:
        document_BT = context.documents_BT
        seen_BhTS &= (document_BT[:, S - T :, None] == document_BT[:, None, :])[:, None]
    return jnp.where(seen_BhTS, logits_BhTS, -1e30)


def attend_to_cache(
    q_B1hK: Array, k_B1gK: Array, v_B1gK: Array, cache: Cache, context: AttentionContext
) -> tuple[Array, Cache]:
    """Returns weighted values_B1hK for one new token of each row, and the cache with the token in it.

    Grouped-query attention: g key/value heads, each shared by r = h / g query heads.
    """
    (B, g, S, K), cp = cache.k_BhSK.shape, context.cp
    slot = context.slot % (S * cp)
    put = functools.partial(split_cache.put, slot=slot, cp=cp)
    k_BgSK, v_BgSK = cache = Cache(put(cache.k_BhSK, k_B1gK), put(cache.v_BhSK, v_B1gK))
    distance_S = (context.slot - split_cache.own_slots(S, cp)) % (S * cp)  # of each slot from the new token
    q_BgrK = q_B1hK.reshape(B, g, -1, K)
    logits_BgrS = jnp.einsum("bgrk,bgsk->bgrs", q_BgrK, k_BgSK, preferred_element_type=jnp.float32)
    logits_BgrS = logits_BgrS * np.float32(1 / math.sqrt(K))
    if context.bias is not None:
        logits_BgrS = logits_BgrS + context.bias[:, distance_S].reshape(1, g, -1, S)
    logits_BgrS = soft_cap(logits_BgrS, context.cap)
    seen_S = distance_S <= context.query_T  # the other slots are empty
    if context.window is not None:
        seen_S &= distance_S < context.window
    logits_BgrS = jnp.where(seen_S[None, None, None], logits_BgrS, -1e30)
    return split_cache.weigh_values(logits_BgrS, v_BgSK, cp).reshape(q_B1hK.shape), cache


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


def _attend_in_blocks(q_BThK, k_BSgK, v_BSgK, context: AttentionContext, dropout: Dropout | None):
    q_BhTK, k_BgTK, v_BgTK = (jnp.swapaxes(x, 1, 2) for x in (q_BThK, k_BSgK, v_BSgK))
    keys, rate = (dropout.at(0).head_keys(q_BhTK.shape[1]), dropout.rate) if dropout else (None, 0.0)
    sight = Sight(vary_like(context.bias, q_BhTK), context.documents_BT, keys, context.window)
    way, block, cap = context.method.way, context.method.block, context.cap
    values_BhTK = attend_in_context(way, q_BhTK, k_BgTK, v_BgTK, sight, block, rate, cap)
    return jnp.swapaxes(values_BhTK, 1, 2)
