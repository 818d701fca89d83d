"""Causal attention in blocks (FlashAttention-2 in plain JAX): memory grows with T, not with its square.

Only blocks on or below the diagonal are computed. The backward pass computes each block's weights again, from the
logarithm of every row's denominator. Dropout draws the same masks as plain attention.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from shardformer.kernels.dropout_mask import keep_mask
from shardformer.kernels.varying import vary_like

MASKED = np.float32(-1e30)
ATTENDED = "attended values"  # by this name a caller's jax.checkpoint may keep what the backward pass needs


def block_size(tokens: int) -> int:
    """Returns the tokens of a block.

    A CPU is fastest with 128, or with 64 in a short context. The result is the largest divisor that is at least half
    of that size; without such a divisor it is that size, and the last block is padded.
    """
    best = 128 if tokens >= 2048 else 64
    return min(tokens, max((size for size in range(best // 2, best + 1) if tokens % size == 0), default=best))


def attend_in_blocks(
    q_BhTK: Array,
    k_BgTK: Array,
    v_BgTK: Array,
    bias_hT: Array | None,
    documents_BT: Array | None,
    keys_Bh2: Array | None,
    rate: float,
    block: int,
) -> Array:
    """Returns weighted values_BhTK; each of the g key/value heads serves h / g query heads in a row.

    `bias_hT` is a head's bias at each distance. `documents_BT` numbers each token's document, the only one that it
    attends to. `keys_Bh2` are the keys of dropout. Each may be None.
    """
    T, missing = q_BhTK.shape[2], -q_BhTK.shape[2] % block
    if missing:  # a token does not see what comes after it
        q_BhTK, k_BgTK, v_BgTK = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in (q_BhTK, k_BgTK, v_BgTK))
        documents_BT = None if documents_BT is None else jnp.pad(documents_BT, ((0, 0), (0, missing)))
    return _attend(q_BhTK, k_BgTK, v_BgTK, bias_hT, documents_BT, keys_Bh2, rate, block, T)[:, :, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attend(q, k, v, bias, documents, keys, rate, block, T):
    return _forward(q, k, v, bias, documents, keys, rate, block, T)[0]


def _forward(q, k, v, bias, documents, keys, rate, block, T):
    """Returns the values and the logarithm of each row's denominator; tokens after the first T are padding."""
    B, h, _, K = q.shape
    g = k.shape[1]

    def compute_rows(i):
        q_i = _take(q, i, block)

        def add_block(j, carry):
            values, largest, total = carry
            logits = _logits(q_i, _take(k, j, block), bias, documents, i, j, T)
            new_largest = jnp.maximum(largest, logits.max(-1))
            weights, shrink = jnp.exp(logits - new_largest[..., None]), jnp.exp(largest - new_largest)
            total = total * shrink + weights.sum(-1)
            weights = weights * _dropout_factor(keys, rate, i, j, block, T)
            more = _product("bgxs,bgsk->bgxk", _group(weights.astype(v.dtype), g), _take(v, j, block))
            return values * shrink[..., None] + _ungroup(more, h), new_largest, total

        zeros = jnp.zeros((B, h, block, K)), jnp.full((B, h, block), MASKED), jnp.zeros((B, h, block))
        values, largest, total = lax.fori_loop(0, i + 1, add_block, vary_like(zeros, q))
        return (values / total[..., None]).astype(q.dtype), largest + jnp.log(total)

    values, log_total = lax.map(compute_rows, jnp.arange(q.shape[2] // block))
    return _join(values), _join(log_total)


def _save_for_backward(q, k, v, bias, documents, keys, rate, block, T):
    results = _forward(q, k, v, bias, documents, keys, rate, block, T)
    values, log_total = (checkpoint_name(result, ATTENDED) for result in results)
    return values, (q, k, v, bias, documents, keys, values, log_total)


def _backward(rate, block, T, saved, d_values):
    q, k, v, bias, documents, keys, values, log_total = saved
    (B, h, padded_T, K), g = q.shape, k.shape[1]
    scale = np.float32(1 / math.sqrt(K))
    expected = _product("bhtk,bhtk->bht", d_values.astype(jnp.float32), values.astype(jnp.float32))

    def compute_columns(carry, j):
        k_j, v_j = _take(k, j, block), _take(v, j, block)

        def add_block(i, carry):
            dq, d_bias, dk_j, dv_j = carry
            q_i, d_values_i = _take(q, i, block), _take(d_values, i, block)
            weights = jnp.exp(_logits(q_i, k_j, bias, documents, i, j, T) - _take(log_total, i, block)[..., None])
            factor = _dropout_factor(keys, rate, i, j, block, T)
            d_values_i = _group(d_values_i, g)
            dv_j = dv_j + _product("bgxs,bgxk->bgsk", _group((weights * factor).astype(v.dtype), g), d_values_i)
            d_weights = _ungroup(_product("bgxk,bgsk->bgxs", d_values_i, v_j), h) * factor
            d_logits = weights * (d_weights - _take(expected, i, block)[..., None])
            if bias is not None:
                d_bias = d_bias.at[:, _distance(i, j, block, T)].add(d_logits.sum(0))
            d_logits = _group((d_logits * scale).astype(q.dtype), g)
            dk_j = dk_j + _product("bgxs,bgxk->bgsk", d_logits, _group(q_i, g))
            more = _take(dq, i, block) + _ungroup(_product("bgxs,bgsk->bgxk", d_logits, k_j), h)
            return lax.dynamic_update_slice_in_dim(dq, more, i * block, axis=2), d_bias, dk_j, dv_j

        zeros = vary_like((jnp.zeros((B, g, block, K)), jnp.zeros((B, g, block, K))), q)
        dq, d_bias, dk_j, dv_j = lax.fori_loop(j, padded_T // block, add_block, (*carry, *zeros))
        return (dq, d_bias), (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    zeros = vary_like((jnp.zeros((B, h, padded_T, K)), None if bias is None else jnp.zeros((h, T))), q)
    (dq, d_bias), (dk, dv) = lax.scan(compute_columns, zeros, jnp.arange(padded_T // block))
    return dq.astype(q.dtype), _join(dk), _join(dv), d_bias, None, None


_attend.defvjp(_save_for_backward, _backward)


def _dropout_factor(keys, rate, i, j, block, T):
    if keys is None:
        return np.float32(1)
    positions = jnp.arange(block)
    keep = keep_mask(keys, rate, i * block + positions, j * block + positions, T)
    return keep.astype(jnp.float32) / (1 - rate)


def _logits(q_i, k_j, bias, documents, i, j, T):
    """Returns the float32 logits of block i of the queries and block j of the keys."""
    block = q_i.shape[2]
    products = _product("bgxk,bgsk->bgxs", _group(q_i, k_j.shape[1]), k_j)
    logits = _ungroup(products, q_i.shape[1]) * np.float32(1 / math.sqrt(q_i.shape[-1]))
    if bias is not None:
        logits = logits + bias[:, _distance(i, j, block, T)][None]
    positions = jnp.arange(block)
    causal = j * block + positions[None, :] <= i * block + positions[:, None]
    seen = causal[None, None]
    if documents is not None:
        of_i, of_j = (lax.dynamic_slice_in_dim(documents, n * block, block, axis=1) for n in (i, j))
        seen = seen & (of_i[:, :, None] == of_j[:, None, :])[:, None]
    return jnp.where(seen, logits, MASKED)


def _distance(i, j, block, T):
    positions = jnp.arange(block)
    return jnp.clip((i - j) * block + positions[:, None] - positions[None, :], 0, T - 1)


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


def _take(x, i, block):
    """Returns block i of axis 2, which is T."""
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=2)


def _join(blocks):
    """Joins blocks [N, B, h, block, ...] to [B, h, T, ...]."""
    N, B, h, block, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(B, h, N * block, *rest)
