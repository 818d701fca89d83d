"""Ring attention: keys and values travel around the shards of the context while each shard attends to its visitors.

In turn t shard s has the keys and values of shard s - t; the last turn sends nothing on. Forward, each shard sends
(cp - 1) / cp of a row's keys and values. Backward, it sends as many again, and as many of their gradients: a gradient
follows its keys one turn later, and arrives at their owner with the parts of all other shards. No exchange waits for
the computation of its turn. A turn is computed in blocks, or by a TPU's kernel if the size of a block is 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config.names import CP
from shardformer.context import blocks, kernel_turns, zigzag
from shardformer.kernels.blockwise_attention import Queries, Sight, Sizes, expected_gradients, keep_for_backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q_BhtK: Array, k_BgtK: Array, v_BgtK: Array, sight: Sight, sizes: Sizes) -> Array:
    """Returns weighted values_BhtK of this shard's queries over the keys of complete rows."""
    return _forward(q_BhtK, k_BgtK, v_BgtK, sight, sizes)[0]


def send(tree):
    """Sends to the next shard; returns what the previous one sent."""
    cp = lax.axis_size(CP)
    return jax.tree.map(lambda x: lax.ppermute(x, CP, [(s, (s + 1) % cp) for s in range(cp)]), tree)


def block_numbers(turn: int, sizes: Sizes) -> tuple[Array, Array]:
    """Returns the numbers of the blocks of this shard's queries, and of the keys that visit it in a turn."""
    cp, shard = lax.axis_size(CP), lax.axis_index(CP)
    count = sizes.tokens // sizes.block
    return zigzag.positions(shard, cp, count), zigzag.positions((shard - turn) % cp, cp, count)


def _forward(q, k, v, sight: Sight, sizes: Sizes):
    """Returns the values and the logarithm of each row's denominator."""
    computing = blocks if sizes.block else kernel_turns
    cp, visiting, running = lax.axis_size(CP), (k, v), computing.start(q, sizes)
    for turn in range(cp):
        arriving = send(visiting) if turn < cp - 1 else visiting
        if sizes.block:
            running = blocks.add_to_rows(running, q, visiting, block_numbers(turn, sizes), sight, sizes)
        else:
            running = kernel_turns.add(running, q, visiting, turn, sight, sizes)
        visiting = arriving
    return computing.finish(running, q)


def _backward(sizes, saved, d_values):
    q, k, v, sight, values, log_total = saved
    queries = Queries(q, d_values, log_total, expected_gradients(d_values, values))
    cp, visiting, sums, parts = lax.axis_size(CP), (k, v), blocks.start_gradients(q, sight), []
    for turn in range(cp):
        arriving = send(visiting) if turn < cp - 1 else visiting
        passed_on = send(parts.pop()) if turn > 1 else None
        if sizes.block:
            sums, part = blocks.add_to_gradients(sums, queries, visiting, block_numbers(turn, sizes), sight, sizes)
        else:
            sums, part = kernel_turns.add_gradients(sums, queries, values, visiting, turn, sight, sizes)
        parts.append(jax.tree.map(jnp.add, passed_on, part) if passed_on else part)
        visiting = arriving
    own, of_others = parts  # those of turn 0 wait here for those of all other turns
    dk, dv = jax.tree.map(jnp.add, own, send(of_others))
    dq, d_bias = sums
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), Sight(bias_hT=d_bias)


attend.defvjp(keep_for_backward(_forward), _backward)
