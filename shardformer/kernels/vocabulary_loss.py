"""Logits over a vocabulary that is split over a mesh axis, and the loss of each token without ever gathering them.

If the logits of all tokens would take much memory, the loss goes through the tokens in chunks. Its forward pass then
computes the gradients of a chunk's logits while these exist, and its backward pass only scales. That needs three
products, as many as with all logits in memory; a backward pass that recomputed logits would need four.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.collectives import sum_to, vary_like
from shardformer.kernels.attention import soft_cap

# Bytes of one chunk's logits, in float32; three or four of them are in memory together. An accelerator reads and
# writes the gradient of the table in every chunk, so that its chunks are larger.
LOGITS_AT_ONCE = {"cpu": 1 << 26, "gpu": 1 << 29, "tpu": 1 << 29}


def multiply_table(h_BTD: Array, table: Array, tied: bool) -> Array:
    """Returns the float32 logits of a table [v, D] if it is tied, else [D, v]."""
    spec = "btd,vd->btv" if tied else "btd,dv->btv"
    return jnp.einsum(spec, h_BTD, table.astype(h_BTD.dtype), preferred_element_type=jnp.float32)


class Vocabulary(NamedTuple):
    """The layout of the output vocabulary, constant in a trace."""

    size: int  # entries from here on are padding, with probability zero
    axis: str  # the mesh axis that the entries are split over
    tied: bool  # a shard's table is [v, D], the rows of an embedding; otherwise [D, v]
    cap: float | None = None  # logits are cap * tanh(logit / cap)
    multiply: Callable = multiply_table  # of activations and the table


class TokenLoss(NamedTuple):
    """Values of each token, the same on every shard of the vocabulary."""

    nats_BT: Array  # cross-entropy
    log_z_BT: Array  # the log-partition, which the z-loss keeps small
    correct_BT: Array  # the target is the most likely token


def project(h_BTD: Array, table: Array, bias_v: Array | None, vocabulary: Vocabulary) -> Array:
    """Returns this shard's logits_BTv in float32; padded entries are -inf."""
    logits_BTv = vocabulary.multiply(h_BTD, table, vocabulary.tied)
    if bias_v is not None:
        logits_BTv = logits_BTv + bias_v[None, None]
    logits_BTv = soft_cap(logits_BTv, vocabulary.cap)
    v = logits_BTv.shape[-1]
    real_v = _offset(v, vocabulary) + jnp.arange(v) < vocabulary.size
    return jnp.where(real_v[None, None], logits_BTv, -jnp.inf)


def measure_tokens(logits_BTv: Array, targets_BT: Array, vocabulary: Vocabulary) -> TokenLoss:
    """Returns each token's losses; only [B, T]-sized arrays cross the wire: a maximum, two sums, and an index."""
    axis, v = vocabulary.axis, logits_BTv.shape[-1]
    local_max_BT = lax.stop_gradient(logits_BTv).max(-1)
    max_BT = collectives.pmax(local_max_BT, axis)
    log_z_BT = max_BT + jnp.log(collectives.psum(jnp.exp(logits_BTv - max_BT[..., None]).sum(-1), axis))

    column_BT = targets_BT - _offset(v, vocabulary)
    in_shard_BT = (column_BT >= 0) & (column_BT < v)
    column_BT1 = jnp.where(in_shard_BT, column_BT, 0)[..., None]
    logit_BT = jnp.take_along_axis(logits_BTv, column_BT1, axis=-1)[..., 0]
    target_logit_BT = collectives.psum(jnp.where(in_shard_BT, logit_BT, jnp.zeros_like(logit_BT)), axis)

    # The lowest index among the largest, across shards. A shard without the maximum bids a number past the end.
    best_BT = _offset(v, vocabulary) + lax.stop_gradient(logits_BTv).argmax(-1)
    past_the_end = v * lax.axis_size(axis)
    predicted_BT = collectives.pmin(jnp.where(local_max_BT == max_BT, best_BT, past_the_end), axis)
    return TokenLoss(log_z_BT - target_logit_BT, log_z_BT, predicted_BT == targets_BT)


def objective(token: TokenLoss, weights_BT: Array, z_loss: float) -> Array:
    """Returns the objective that training minimises, as a weighted sum over this shard's tokens."""
    return (weights_BT * (token.nats_BT + z_loss * jnp.square(token.log_z_BT))).sum()


def tokens_at_once(v: int, platform: str) -> int:
    """Returns the number of tokens whose logits, over the v entries of a shard, may be in memory together."""
    return max(LOGITS_AT_ONCE.get(platform, LOGITS_AT_ONCE["cpu"]) // (4 * v), 1)


def measure_in_chunks(
    h_BTD: Array, table: Any, bias_v: Array | None, targets_BT: Array, vocabulary: Vocabulary, chunk: int
) -> TokenLoss:
    """Returns each token's loss, with the logits of at most `chunk` tokens in memory.

    The backward pass computes the logits of a chunk again.
    """

    @jax.checkpoint
    def measure(part):
        h_1cD, targets_1c = part
        return measure_tokens(project(h_1cD, table, bias_v, vocabulary), targets_1c, vocabulary)

    return join_tokens(lax.map(measure, split_tokens((h_BTD, targets_BT), chunk)), targets_BT.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def loss_in_chunks(
    h_BTD: Array,
    table: Array,
    bias_v: Array | None,
    targets_BT: Array,
    weights_BT: Array,
    vocabulary: Vocabulary,
    z_loss: float,
    chunk: int,
) -> tuple[Array, TokenLoss]:
    """Returns (`objective`, each token's loss), with the logits of at most `chunk` tokens in memory.

    Only the objective has a gradient, in `h_BTD`, `table` and `bias_v`.
    """

    token = measure_in_chunks(h_BTD, table, bias_v, targets_BT, vocabulary, chunk)
    return objective(token, weights_BT, z_loss), token


def loss_in_recomputed_chunks(
    h_BTD: Array,
    table: Any,
    bias_v: Array | None,
    targets_BT: Array,
    weights_BT: Array,
    vocabulary: Vocabulary,
    z_loss: float,
    chunk: int,
) -> tuple[Array, TokenLoss]:
    """Returns what `loss_in_chunks` does, for a frozen table.

    The backward pass recomputes the logits of a chunk. That needs three products too: there is no gradient of a table.
    """
    token = measure_in_chunks(h_BTD, table, bias_v, targets_BT, vocabulary, chunk)
    return objective(token, weights_BT, z_loss), token


def _differentiate(h_BTD, table, bias_v, targets_BT, weights_BT, vocabulary, z_loss, chunk):
    """Returns the losses, and their gradients for a cotangent of one, which `_scale` multiplies."""
    used_table = table.astype(h_BTD.dtype)  # once, and not in every chunk
    to_h, to_table = ("btv,vd->btd", "btv,btd->vd") if vocabulary.tied else ("btv,dv->btd", "btd,btv->dv")

    def add_chunk(sums, part):
        h_1cD, targets_1c, weights_1c = part
        logits_1cv = project(h_1cD, used_table, bias_v, vocabulary)
        token = measure_tokens(logits_1cv, targets_1c, vocabulary)
        d_logits_1cv = _gradient_of_logits(logits_1cv, token.log_z_BT, targets_1c, weights_1c, vocabulary, z_loss)
        d_table, d_bias = sums
        if bias_v is not None:
            d_bias = d_bias + d_logits_1cv.sum((0, 1))
        d_logits_1cv = d_logits_1cv.astype(h_1cD.dtype)
        d_h_1cD = jnp.einsum(to_h, d_logits_1cv, used_table)
        factors = (d_logits_1cv, h_1cD) if vocabulary.tied else (h_1cD, d_logits_1cv)
        d_table = d_table + jnp.einsum(to_table, *factors, preferred_element_type=jnp.float32)
        return (d_table, d_bias), (d_h_1cD, token)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (table, bias_v))
    parts = split_tokens((h_BTD, targets_BT, weights_BT), chunk)
    (d_table, d_bias), (d_h, token) = lax.scan(add_chunk, vary_like(zeros, h_BTD, table, weights_BT), parts)
    token = join_tokens(token, targets_BT.shape)
    return (objective(token, weights_BT, z_loss), token), (
        join_tokens(d_h, h_BTD.shape[:2]),
        d_table,
        d_bias,
        table,
        bias_v,
    )


def _gradient_of_logits(logits_1cv, log_z_1c, targets_1c, weights_1c, vocabulary, z_loss):
    """Returns the gradient of the objective in the logits before their cap."""
    v = logits_1cv.shape[-1]
    column_1c = targets_1c - _offset(v, vocabulary)
    is_target_1cv = column_1c[..., None] == jnp.arange(v)[None, None]
    probability_1cv = jnp.exp(logits_1cv - log_z_1c[..., None])
    factor_1c = 1 + 2 * z_loss * log_z_1c
    d_logits_1cv = weights_1c[..., None] * (probability_1cv * factor_1c[..., None] - is_target_1cv.astype(jnp.float32))
    if vocabulary.cap is None:
        return d_logits_1cv
    slope_1cv = 1 - jnp.square(logits_1cv / vocabulary.cap)  # of cap * tanh(x / cap)
    return jnp.where(jnp.isfinite(logits_1cv), d_logits_1cv * slope_1cv, 0.0)  # padded entries are -inf


def _scale(vocabulary, z_loss, chunk, saved, cotangents):
    d_h, d_table, d_bias, table, bias_v = saved
    factor = cotangents[0]
    d_table = sum_to(d_table * factor, table).astype(table.dtype)
    d_bias = None if bias_v is None else sum_to(d_bias * factor, bias_v)
    d_h = (d_h.astype(jnp.float32) * factor).astype(d_h.dtype)
    return d_h, d_table, d_bias, None, None


loss_in_chunks.defvjp(_differentiate, _scale)


def split_tokens(tree, chunk: int):
    """Splits arrays of [B, T, ...] into chunks of one row, [chunks, 1, c, ...]; zeros pad the last chunk."""

    def split(x):
        tokens = x.shape[0] * x.shape[1]
        chunks = -(-tokens // chunk)
        c = -(-tokens // chunks)
        flat = x.reshape(tokens, *x.shape[2:])
        if missing := chunks * c - tokens:
            flat = jnp.pad(flat, ((0, missing), *[(0, 0)] * (flat.ndim - 1)))
        return flat.reshape(chunks, 1, c, *x.shape[2:])

    return jax.tree.map(split, tree)


def join_tokens(tree, shape: tuple[int, ...]):
    """Inverts `split_tokens`."""
    tokens = shape[0] * shape[1]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[:tokens].reshape(*shape, *x.shape[3:]), tree)


def _offset(v: int, vocabulary: Vocabulary):
    """Returns the first entry of this shard's part of the vocabulary."""
    return collectives.index(vocabulary.axis) * v


def measure_divergence(student_BTv: Array, teacher_BTv: Array, axis: str, direction: str) -> Array:
    """Returns the KL divergence of every token from the two models' logits; padded entries, -inf, have none.

    forward: the sum of p_teacher log(p_teacher / p_student); reverse: of p_student log(p_student / p_teacher).
    """
    real_BTv = jnp.isfinite(teacher_BTv) & jnp.isfinite(student_BTv)
    student_BTv, teacher_BTv = (_log_probabilities(x, axis) for x in (student_BTv, teacher_BTv))
    first, second = (teacher_BTv, student_BTv) if direction == "forward" else (student_BTv, teacher_BTv)
    # -inf - -inf would be NaN, in the gradient too.
    first, second = (jnp.where(real_BTv, x, 0.0) for x in (first, second))
    terms_BTv = jnp.where(real_BTv, jnp.exp(first), 0.0) * (first - second)
    return collectives.psum(terms_BTv.sum(-1), axis)


def _log_probabilities(logits_BTv: Array, axis: str) -> Array:
    """Returns the logarithms of the probabilities of this shard's entries."""
    max_BT = collectives.pmax(lax.stop_gradient(logits_BTv).max(-1), axis)
    log_z_BT = max_BT + jnp.log(collectives.psum(jnp.exp(logits_BTv - max_BT[..., None]).sum(-1), axis))
    return logits_BTv - log_z_BT[..., None]
