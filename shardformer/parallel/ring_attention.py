"""Attention to the tokens of all shards of the context: by a ring, or by a gather.

In a ring, keys and values travel around the shards while each shard attends to its visitors. In step t shard s has the
keys and values of shard s - t; the last step sends nothing on. Forward, each shard sends (cp - 1) / cp of a row's keys
and values. Backward, it sends as many again, and as many of their gradients: a gradient follows its keys one step
later, and arrives at their owner with the parts of all other shards. No exchange waits for the computation of its
step. A step is computed in blocks, or by a TPU's kernel (`ring_kernel.py`).

With a gather, every shard has the keys and values of complete rows while it attends. Nothing of that size is saved: the
backward pass regathers, and scatters the gradients. It sends what a ring sends, in one exchange instead of cp - 1,
which is not hidden behind computation.

A block has its index in the complete row. Masks, documents, windows, biases and dropout depend on these indices only,
so that they are those of one device. Pairs of blocks that the causal mask or a window hides are not computed.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.collectives import vary_like
from shardformer.config.names import CP
from shardformer.kernels.attention import AttentionOptions
from shardformer.kernels.blockwise_attention import (
    Mask,
    Queries,
    Running,
    Sizes,
    add_gradients,
    add_keys,
    expected_gradients,
    join_blocks,
    keep_for_backward,
    no_keys,
    prepare,
    sink_gradients,
    take_block,
)
from shardformer.parallel import context, ring_kernel
from shardformer.parallel.context import SplitContext

TOKENS = 2  # the axis of BgtK


@dataclasses.dataclass(frozen=True)
class Ring(SplitContext):
    """Ring attention in blocks of this many tokens."""

    block: int = 0  # 0: by the kernel of a TPU
    bias_by_distance: ClassVar[bool] = True

    @property
    def uses_kernel(self) -> bool:  # type: ignore[override]
        return not self.block

    def __str__(self) -> str:
        return f"ring, blocks of {self.block} tokens" if self.block else "ring, fused"

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        return _attend_to_rows(attend_in_ring, self.block, q_BThK, k_BSgK, v_BSgK, options)


@dataclasses.dataclass(frozen=True)
class Gathered(SplitContext):
    """Attention to gathered keys and values, in blocks of this many tokens."""

    block: int = 64
    bias_by_distance: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"gather, blocks of {self.block} tokens"

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        return _attend_to_rows(attend_to_gathered, self.block, q_BThK, k_BSgK, v_BSgK, options)


def _attend_to_rows(method, block: int, q_BThK, k_BSgK, v_BSgK, options: AttentionOptions) -> Array:
    (q_BhtK, k_BgtK, v_BgtK), mask, rate = prepare(q_BThK, k_BSgK, v_BSgK, options)
    tokens = q_BhtK.shape[2] * lax.axis_size(CP)
    if mask.window is not None:
        mask = mask._replace(window=jnp.minimum(mask.window, tokens))
    if not block:  # the kernel does not scale the logits
        q_BhtK = (q_BhtK.astype(jnp.float32) / math.sqrt(q_BhtK.shape[-1])).astype(q_BhtK.dtype)
    return jnp.swapaxes(method(q_BhtK, k_BgtK, v_BgtK, mask, Sizes(block, tokens, rate, options.cap)), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_in_ring(q_BhtK: Array, k_BgtK: Array, v_BgtK: Array, mask: Mask, sizes: Sizes) -> Array:
    """Returns weighted values_BhtK of this shard's queries over the keys of complete rows."""
    return _forward(q_BhtK, k_BgtK, v_BgtK, mask, sizes)[0]


def send(tree):
    """Sends to the next shard; returns what the previous one sent."""
    cp = lax.axis_size(CP)
    return jax.tree.map(lambda x: lax.ppermute(x, CP, [(s, (s + 1) % cp) for s in range(cp)]), tree)


def indices_in_ring(step: int, sizes: Sizes) -> tuple[Array, Array]:
    """Returns the indices of the blocks of this shard's queries, and of the keys that visit it in a step."""
    cp, shard = lax.axis_size(CP), lax.axis_index(CP)
    count = sizes.tokens // sizes.block
    return context.positions(shard, cp, count), context.positions((shard - step) % cp, cp, count)


def _forward(q, k, v, mask: Mask, sizes: Sizes):
    """Returns the values and the logarithm of each row's denominator."""
    cp, visiting = lax.axis_size(CP), (k, v)
    running: Any = start_rows(q, v, mask, sizes) if sizes.block else ring_kernel.start(q)
    for step in range(cp):
        arriving = send(visiting) if step < cp - 1 else visiting
        if sizes.block:
            running = add_to_rows(running, q, visiting, indices_in_ring(step, sizes), mask, sizes)
        else:
            running = ring_kernel.add(running, q, visiting, step, mask, sizes)
        visiting = arriving
    return finish_rows(running, q) if sizes.block else ring_kernel.finish(running, q)


def _backward(sizes, saved, d_values):
    q, k, v, mask, values, log_total = saved
    queries = Queries(q, d_values, log_total, expected_gradients(d_values, values))
    cp, visiting, sums, parts = lax.axis_size(CP), (k, v), start_gradients(q, mask), []
    for step in range(cp):
        arriving = send(visiting) if step < cp - 1 else visiting
        passed_on = send(parts.pop()) if step > 1 else None
        if sizes.block:
            sums, part = add_to_gradients(sums, queries, visiting, indices_in_ring(step, sizes), mask, sizes)
        else:
            sums, part = ring_kernel.add_gradients(sums, queries, values, visiting, step, mask, sizes)
        parts.append(jax.tree.map(jnp.add, passed_on, part) if passed_on else part)
        visiting = arriving
    local, of_other_devices = parts  # those of step 0 wait here for those of all other steps
    dk, dv = jax.tree.map(jnp.add, local, send(of_other_devices))
    dq, d_bias = sums
    d_mask = Mask(bias_hT=d_bias, sink_1h1=sink_gradients(mask, queries))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_mask


attend_in_ring.defvjp(keep_for_backward(_forward), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_to_gathered(q_BhtK: Array, k_BgtK: Array, v_BgtK: Array, mask: Mask, sizes: Sizes) -> Array:
    """Returns weighted values_BhtK of this shard's queries over the keys of complete rows."""
    return _forward_gathered(q_BhtK, k_BgtK, v_BgtK, mask, sizes)[0]


def indices_in_rows(sizes: Sizes) -> tuple[Array, Array]:
    """Returns the indices of the blocks of this shard's queries, and of all keys."""
    count = sizes.tokens // sizes.block
    return context.local_positions(count, lax.axis_size(CP)), jnp.arange(count)


def _forward_gathered(q, k, v, mask: Mask, sizes: Sizes):
    """Returns the values and the logarithm of each row's denominator."""
    running, keys = start_rows(q, v, mask, sizes), context.gather((k, v), TOKENS)
    return finish_rows(add_to_rows(running, q, keys, indices_in_rows(sizes), mask, sizes), q)


def _backward_gathered(sizes, saved, d_values):
    q, k, v, mask, values, log_total = saved
    queries = Queries(q, d_values, log_total, expected_gradients(d_values, values))
    keys, sums = context.gather((k, v), TOKENS), start_gradients(q, mask)
    (dq, d_bias), parts = add_to_gradients(sums, queries, keys, indices_in_rows(sizes), mask, sizes)
    dk, dv = jax.tree.map(_scatter, parts)
    d_mask = Mask(bias_hT=d_bias, sink_1h1=sink_gradients(mask, queries))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_mask


def _scatter(x_BgTK: Array) -> Array:
    """Adds up all shards' parts of complete rows; each shard keeps its tokens."""
    return lax.psum_scatter(context.to_shards(x_BgTK, TOKENS), CP, scatter_dimension=TOKENS, tiled=True)


attend_to_gathered.defvjp(keep_for_backward(_forward_gathered), _backward_gathered)


# The blocks of this shard's queries with blocks of any shard's keys: sums that further keys are added to.


def start_rows(q_BhtK: Array, v_BgtK: Array, mask: Mask, sizes: Sizes) -> Running:
    """Returns the softmax over no keys for each block of the queries: arrays of [blocks, B, h, block, ...]."""
    B, h, t, _ = q_BhtK.shape
    return vary_like(no_keys((t // sizes.block, B, h, sizes.block, v_BgtK.shape[-1]), mask.sink_1h1), q_BhtK)


def add_to_rows(
    running: Running, q_BhtK: Array, keys: tuple[Array, Array], indices: tuple[Array, Array], mask: Mask, sizes: Sizes
) -> Running:
    """Adds keys and values to the softmax of all queries; `indices` are those of the query and the key blocks."""
    (k, v), (number_n, number_m), block = keys, indices, sizes.block

    def compute_rows(each):
        n, running_n = each
        i, q_n = number_n[n], take_block(q_BhtK, n, block)

        def add_block(m, running_n):
            return add_keys(running_n, q_n, k, v, m, mask, sizes, (i, number_m[m]))

        earliest = 0 if mask.window is None else jnp.maximum(i * block - mask.window + 1, 0) // block
        return lax.fori_loop((number_m < earliest).sum(), (number_m <= i).sum(), add_block, running_n)

    return Running(*lax.map(compute_rows, (jnp.arange(q_BhtK.shape[2] // block), running)))


def finish_rows(running: Running, q_BhtK: Array) -> tuple[Array, Array]:
    """Returns weighted values_BhtK and the logarithm of each row's denominator."""
    values, largest, total = running
    return join_blocks((values / total[..., None]).astype(q_BhtK.dtype)), join_blocks(largest + jnp.log(total))


def start_gradients(q_BhtK: Array, mask: Mask) -> tuple[Array, Array | None]:
    """Returns zero gradients in the queries and in the bias, in float32."""
    bias = mask.bias_hT
    zeros = jnp.zeros(q_BhtK.shape), None if bias is None else jnp.zeros(bias.shape)
    return vary_like(zeros, q_BhtK)


def add_to_gradients(
    sums: tuple, queries: Queries, keys: tuple[Array, Array], indices: tuple[Array, Array], mask: Mask, sizes: Sizes
) -> tuple[tuple, tuple[Array, Array]]:
    """Adds the part of these keys to (dq, d_bias); returns the sums and (dk, dv) of this shard's queries in float32."""
    (k, v), (number_n, number_m), block = keys, indices, sizes.block
    zeros = vary_like(tuple(jnp.zeros((*x.shape[:2], block, x.shape[3])) for x in (k, v)), queries.q_BhTK)

    def compute_columns(sums, m):
        j, k_m, v_m = number_m[m], take_block(k, m, block), take_block(v, m, block)

        def add_block(n, sums):
            return add_gradients(sums, queries, n, k_m, v_m, mask, sizes, (number_n[n], j))

        end = number_n.size
        if mask.window is not None:
            end = (number_n <= (j * block + block + mask.window - 2) // block).sum()
        dq, d_bias, dk_m, dv_m = lax.fori_loop((number_n < j).sum(), end, add_block, (*sums, *zeros))
        return (dq, d_bias), (dk_m, dv_m)

    sums, gradients = lax.scan(compute_columns, sums, jnp.arange(number_m.size))
    return sums, (join_blocks(gradients[0]), join_blocks(gradients[1]))
