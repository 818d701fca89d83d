"""Attention to gathered keys and values: every shard of the context has those of complete rows while it attends.

Nothing of that size is kept: the backward pass gathers again, and scatters the gradients. It sends what a ring sends.
The exchange is not hidden behind computation, but it is one instead of cp - 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config.names import CP
from shardformer.context import blocks, zigzag
from shardformer.kernels.blockwise_attention import Queries, Sight, Sizes, expected_gradients, keep_for_backward

TOKENS = 2  # the axis of BgtK


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q_BhtK: Array, k_BgtK: Array, v_BgtK: Array, sight: Sight, sizes: Sizes) -> Array:
    """Returns weighted values_BhtK of this shard's queries over the keys of complete rows."""
    return _forward(q_BhtK, k_BgtK, v_BgtK, sight, sizes)[0]


def block_numbers(sizes: Sizes) -> tuple[Array, Array]:
    """Returns the numbers of the blocks of this shard's queries, and of all keys."""
    count = sizes.tokens // sizes.block
    return zigzag.own_positions(count, lax.axis_size(CP)), jnp.arange(count)


def _forward(q, k, v, sight: Sight, sizes: Sizes):
    """Returns the values and the logarithm of each row's denominator."""
    running, keys = blocks.start(q, sizes), zigzag.gather((k, v), TOKENS)
    return blocks.finish(blocks.add_to_rows(running, q, keys, block_numbers(sizes), sight, sizes), q)


def _backward(sizes, saved, d_values):
    q, k, v, sight, values, log_total = saved
    queries = Queries(q, d_values, log_total, expected_gradients(d_values, values))
    keys, sums = zigzag.gather((k, v), TOKENS), blocks.start_gradients(q, sight)
    (dq, d_bias), parts = blocks.add_to_gradients(sums, queries, keys, block_numbers(sizes), sight, sizes)
    dk, dv = jax.tree.map(_scatter, parts)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), Sight(bias_hT=d_bias)


def _scatter(x_BgTK: Array) -> Array:
    """Adds up all shards' parts of complete rows; each shard keeps its own tokens."""
    return lax.psum_scatter(zigzag.to_shards(x_BgTK, TOKENS), CP, scatter_dimension=TOKENS, tiled=True)


attend.defvjp(keep_for_backward(_forward), _backward)
