"""Causal attention in blocks (FlashAttention-2 in plain JAX): memory grows with T, not with its square.

Only blocks on or below the diagonal are computed, and of these only blocks that a window reaches. The backward pass
recomputes each block's weights from the logarithm of every row's denominator. Dropout draws the same masks as
plain attention.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from shardformer.collectives import vary_like
from shardformer.kernels.attention import ATTENDED, MASKED, Attention, AttentionOptions, soft_cap
from shardformer.kernels.threefry import keep_mask


class Mask(NamedTuple):
    """The inputs of attention that differ from token to token; None where nothing does."""

    bias_hT: Array | None = None  # each head's bias at each distance
    documents_BT: Array | None = None  # each token's document, the only one that it attends to
    keys_Bh2: Array | None = None  # keys of dropout
    window: Array | int | None = None  # tokens in range, the query's included
    sink_1h1: Array | None = None  # each head's logit that only the denominators have
    chunk: Array | int | None = None  # tokens of a chunk, of which a query sees only its own


class Sizes(NamedTuple):
    """The constants of one call."""

    block: int
    tokens: int  # of a complete row; those after the first `tokens` are padding
    rate: float
    cap: float | None


class Running(NamedTuple):
    """The softmax of a block of queries over the keys so far."""

    values_BhxK: Array  # weighted sums, relative to the largest logit
    largest_Bhx: Array
    total_Bhx: Array


class Queries(NamedTuple):
    """The arrays of all queries that the gradients of any block need."""

    q_BhTK: Array
    d_values_BhTK: Array
    log_total_BhT: Array  # the logarithm of each row's denominator
    expected_BhT: Array  # the weighted mean of each row's d_weights


@dataclasses.dataclass(frozen=True)
class Blocks(Attention):
    """Blocks of queries with blocks of keys, on one device's complete rows."""

    block: int = 64  # tokens
    bias_by_distance: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"blocks of {self.block} tokens"

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        (q_BhTK, k_BgTK, v_BgTK), mask, rate = prepare(q_BThK, k_BSgK, v_BSgK, options)
        return jnp.swapaxes(attend_in_blocks(q_BhTK, k_BgTK, v_BgTK, mask, self.block, rate, options.cap), 1, 2)


def prepare(q_BThK, k_BSgK, v_BSgK, options: AttentionOptions) -> tuple[tuple[Array, ...], Mask, float]:
    """Returns (q_BhTK, k_BgSK, v_BgSK), their mask and the rate of dropout."""
    q_BhTK, k_BgTK, v_BgTK = (jnp.swapaxes(x, 1, 2) for x in (q_BThK, k_BSgK, v_BSgK))
    keys, rate = None, 0.0
    if options.dropout:
        keys, rate = options.dropout.at(0).head_keys(q_BhTK.shape[1]), options.dropout.rate
    sink_1h1 = None if options.sink_1h11 is None else options.sink_1h11[..., 0]
    bias, sink_1h1 = vary_like((options.bias, sink_1h1), q_BhTK)
    mask = Mask(bias, options.documents_BT, keys, options.window, sink_1h1, options.chunk)
    return (q_BhTK, k_BgTK, v_BgTK), mask, rate


def block_size(tokens: int) -> int:
    """Returns the tokens of a block.

    A CPU is fastest with 128, or with 64 in a short context. The result is the largest divisor that is at least half
    of that size; without a divisor it is that size, and the last block is padded.
    """
    best = 128 if tokens >= 2048 else 64
    return min(tokens, max((size for size in range(best // 2, best + 1) if tokens % size == 0), default=best))


def attend_in_blocks(
    q_BhTK: Array, k_BgTK: Array, v_BgTK: Array, mask: Mask, block: int, rate: float = 0.0, cap: float | None = None
) -> Array:
    """Returns weighted values_BhTK; each of the g key/value heads serves h / g query heads in a row."""
    T, missing = q_BhTK.shape[2], -q_BhTK.shape[2] % block
    if missing:  # later tokens are masked
        q_BhTK, k_BgTK, v_BgTK = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in (q_BhTK, k_BgTK, v_BgTK))
        if mask.documents_BT is not None:
            mask = mask._replace(documents_BT=jnp.pad(mask.documents_BT, ((0, 0), (0, missing))))
    if mask.window is not None:
        mask = mask._replace(window=jnp.minimum(mask.window, T))
    return _attend(q_BhTK, k_BgTK, v_BgTK, mask, Sizes(block, T, rate, cap))[:, :, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, mask: Mask, sizes: Sizes):
    return _forward(q, k, v, mask, sizes)[0]


def _forward(q, k, v, mask: Mask, sizes: Sizes):
    """Returns the values and the logarithm of each row's denominator."""
    (B, h, padded_T, _), block = q.shape, sizes.block

    def compute_rows(i):
        q_i = take_block(q, i, block)

        def add_block(j, running):
            return add_keys(running, q_i, k, v, j, mask, sizes, (i, j))

        zeros = no_keys((B, h, block, v.shape[-1]), mask.sink_1h1)
        first = 0 if mask.window is None else jnp.maximum(i * block - mask.window + 1, 0) // block
        values, largest, total = lax.fori_loop(first, i + 1, add_block, vary_like(zeros, q))
        return (values / total[..., None]).astype(q.dtype), largest + jnp.log(total)

    values, log_total = lax.map(compute_rows, jnp.arange(padded_T // block))
    return join_blocks(values), join_blocks(log_total)


def no_keys(shape: tuple[int, ...], sink_1h1: Array | None = None) -> Running:
    """Returns the softmax of queries [..., h, x, K] over no keys, and over each head's sink if there are sinks."""
    if sink_1h1 is None:
        return Running(jnp.zeros(shape), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1]))
    return Running(jnp.zeros(shape), jnp.broadcast_to(sink_1h1, shape[:-1]), jnp.ones(shape[:-1]))


def add_keys(running: Running, q_i, k, v, position, mask: Mask, sizes: Sizes, indices) -> Running:
    """Adds a block of the keys and values to the softmax of block i of the queries.

    The block is at `position` in `k` and `v`, and has number j of the row; `indices` are (i, j).
    """
    values, largest, total = running
    g, h = k.shape[1], q_i.shape[1]
    logits = _logits(q_i, take_block(k, position, sizes.block), mask, sizes, *indices)[0]
    new_largest = jnp.maximum(largest, logits.max(-1))
    weights, shrink = jnp.exp(logits - new_largest[..., None]), jnp.exp(largest - new_largest)
    total = total * shrink + weights.sum(-1)
    weights = weights * _dropout_factor(mask, sizes, *indices)
    more = _product("bgxs,bgsk->bgxk", _group(weights.astype(v.dtype), g), take_block(v, position, sizes.block))
    return Running(values * shrink[..., None] + _ungroup(more, h), new_largest, total)


def keep_for_backward(forward: Callable) -> Callable:
    """Returns the first half of a custom_vjp, which keeps the values and denominators of `forward` by name."""

    def save(q, k, v, mask: Mask, sizes: Sizes):
        values, log_total = (checkpoint_name(result, ATTENDED) for result in forward(q, k, v, mask, sizes))
        return values, (q, k, v, mask, values, log_total)

    return save


def _backward(sizes, saved, d_values):
    q, k, v, mask, values, log_total = saved
    (B, h, padded_T, K), g, block, bias = q.shape, k.shape[1], sizes.block, mask.bias_hT
    queries = Queries(q, d_values, log_total, expected_gradients(d_values, values))

    def compute_columns(carry, j):
        k_j, v_j = take_block(k, j, block), take_block(v, j, block)

        def add_block(i, sums):
            return add_gradients(sums, queries, i, k_j, v_j, mask, sizes, (i, j))

        zeros = vary_like(tuple(jnp.zeros((B, g, block, x.shape[-1])) for x in (k, v)), q)
        end = padded_T // block
        if mask.window is not None:
            end = jnp.minimum((j * block + block + mask.window - 2) // block + 1, end)
        dq, d_bias, dk_j, dv_j = lax.fori_loop(j, end, add_block, (*carry, *zeros))
        return (dq, d_bias), (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    zeros = vary_like((jnp.zeros((B, h, padded_T, K)), None if bias is None else jnp.zeros((h, sizes.tokens))), q)
    (dq, d_bias), (dk, dv) = lax.scan(compute_columns, zeros, jnp.arange(padded_T // block))
    d_mask = Mask(bias_hT=d_bias, sink_1h1=sink_gradients(mask, queries))
    return dq.astype(q.dtype), join_blocks(dk), join_blocks(dv), d_mask


_attend.defvjp(keep_for_backward(_forward), _backward)


def expected_gradients(d_values_BhTK: Array, values_BhTK: Array) -> Array:
    """Returns each row's weighted mean of the gradients in its weights."""
    return _product("bhtk,bhtk->bht", d_values_BhTK.astype(jnp.float32), values_BhTK.astype(jnp.float32))


def sink_gradients(mask: Mask, queries: Queries) -> Array | None:
    """Returns the gradients in the sinks, of which no value is weighted: each lowers its row's expected gradient."""
    if mask.sink_1h1 is None:
        return None
    weights_BhT = jnp.exp(mask.sink_1h1 - queries.log_total_BhT)
    return -(weights_BhT * queries.expected_BhT).sum((0, 2), keepdims=True)


def add_gradients(sums: tuple, queries: Queries, position, k_j, v_j, mask: Mask, sizes: Sizes, indices) -> tuple:
    """Adds to the sums (dq, d_bias, dk_j, dv_j) the gradients of one pair of blocks.

    The pair is block i of the queries, at `position` in their array, and block j of the keys; `indices` are (i, j).
    """
    (dq, d_bias, dk_j, dv_j), (i, j) = sums, indices
    g, h, block = k_j.shape[1], queries.q_BhTK.shape[1], sizes.block
    q_i, d_values_i = (take_block(x, position, block) for x in (queries.q_BhTK, queries.d_values_BhTK))
    logits, slope = _logits(q_i, k_j, mask, sizes, i, j)
    weights = jnp.exp(logits - take_block(queries.log_total_BhT, position, block)[..., None])
    factor = _dropout_factor(mask, sizes, i, j)
    d_values_i = _group(d_values_i, g)
    dv_j = dv_j + _product("bgxs,bgxk->bgsk", _group((weights * factor).astype(v_j.dtype), g), d_values_i)
    d_weights = _ungroup(_product("bgxk,bgsk->bgxs", d_values_i, v_j), h) * factor
    d_logits = weights * (d_weights - take_block(queries.expected_BhT, position, block)[..., None])
    if slope is not None:
        d_logits = d_logits * slope
    if mask.bias_hT is not None:
        d_bias = d_bias.at[:, _distance(i, j, sizes)].add(d_logits.sum(0))
    d_logits = _group((d_logits * np.float32(1 / math.sqrt(q_i.shape[-1]))).astype(q_i.dtype), g)
    dk_j = dk_j + _product("bgxs,bgxk->bgsk", d_logits, _group(q_i, g))
    more = take_block(dq, position, block) + _ungroup(_product("bgxs,bgsk->bgxk", d_logits, k_j), h)
    return lax.dynamic_update_slice_in_dim(dq, more, position * block, axis=2), d_bias, dk_j, dv_j


def _dropout_factor(mask: Mask, sizes: Sizes, i, j):
    if mask.keys_Bh2 is None:
        return np.float32(1)
    block, positions = sizes.block, jnp.arange(sizes.block)
    keep = keep_mask(mask.keys_Bh2, sizes.rate, i * block + positions, j * block + positions, sizes.tokens)
    return keep.astype(jnp.float32) / (1 - sizes.rate)


def _logits(q_i, k_j, mask: Mask, sizes: Sizes, i, j):
    """Returns the float32 logits of block i of the queries and block j of the keys, and the slope of their cap."""
    block, positions = sizes.block, jnp.arange(sizes.block)
    products = _product("bgxk,bgsk->bgxs", _group(q_i, k_j.shape[1]), k_j)
    logits = _ungroup(products, q_i.shape[1]) * np.float32(1 / math.sqrt(q_i.shape[-1]))
    if mask.bias_hT is not None:
        logits = logits + mask.bias_hT[:, _distance(i, j, sizes)][None]
    logits = soft_cap(logits, sizes.cap)
    slope = None if sizes.cap is None else 1 - jnp.square(logits / sizes.cap)
    in_range = j * block + positions[None, :] <= i * block + positions[:, None]
    if mask.window is not None:
        in_range &= (i - j) * block + positions[:, None] - positions[None, :] < mask.window
    if mask.chunk is not None:
        chunk_x, chunk_s = ((n * block + positions) // mask.chunk for n in (i, j))
        in_range &= chunk_x[:, None] == chunk_s[None, :]
    visible = in_range[None, None]
    if mask.documents_BT is not None:
        of_i, of_j = (lax.dynamic_slice_in_dim(mask.documents_BT, n * block, block, axis=1) for n in (i, j))
        visible = visible & (of_i[:, :, None] == of_j[:, None, :])[:, None]
    return jnp.where(visible, logits, MASKED), slope


def _distance(i, j, sizes: Sizes):
    positions = jnp.arange(sizes.block)
    return jnp.clip((i - j) * sizes.block + positions[:, None] - positions[None, :], 0, sizes.tokens - 1)


def _product(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _group(x, g: int):
    """Joins the rows of the query heads that share a key/value head: [B, h, t, n] to [B, g, h / g * t, n]."""
    B, _, _, n = x.shape
    return x.reshape(B, g, -1, n)


def _ungroup(x, h: int):
    """Inverts `_group`."""
    B, _, _, n = x.shape
    return x.reshape(B, h, -1, n)


def take_block(x, i, block: int):
    """Returns block i of axis 2, which is T."""
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=2)


def join_blocks(blocks):
    """Joins blocks [N, B, h, block, ...] to [B, h, T, ...]."""
    N, B, h, block, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(B, h, N * block, *rest)
