"""The steps of a ring by a TPU's kernel, splash attention, whose statistics join them.

In step 0 a shard attends causally to its two chunks. In each later step, two pairs of chunks are visible, and both
are visible completely: the later queries see the visitor's earlier keys; and the earlier queries see these too if the
visitor precedes this shard, or else the later queries see the visitor's later keys. One call computes both pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.collectives import vary_like
from shardformer.config.names import CP
from shardformer.kernels.attention import MASKED
from shardformer.kernels.blockwise_attention import Mask, Queries, Sizes
from shardformer.kernels.fused_attention import make_splash
from shardformer.kernels.typed_pallas import typed_kernel
from shardformer.parallel import context

TOKENS = 2  # the axis of BhtK


class Part(NamedTuple):
    """Attention to some of the keys."""

    values_BhtK: Array
    log_total_Bht: Array  # the logarithm of each row's denominator


def start(q_BhtK: Array) -> Part:
    """Returns attention to no keys."""
    return vary_like(Part(jnp.zeros(q_BhtK.shape), jnp.full(q_BhtK.shape[:3], MASKED)), q_BhtK)


def add(part: Part, q_BhtK: Array, keys: tuple[Array, Array], step: int, mask: Mask, sizes: Sizes) -> Part:
    """Adds the keys and values that visit in a step."""
    documents = _documents_of(step, mask)
    if step == 0:
        return _join(part, _attend(q_BhtK, keys, documents, True, sizes.cap))
    precedes = _visitor_precedes(step)
    pairs = _stack_queries(q_BhtK, precedes), tuple(_stack_keys(x, precedes) for x in keys)
    parts = _attend(*pairs, _stack_documents(documents, precedes), False, sizes.cap)
    always, either = (Part(*half) for half in zip(*(jnp.split(x, 2) for x in parts), strict=True))
    early, late = (Part(*half) for half in zip(*(jnp.split(x, 2, TOKENS) for x in part), strict=True))
    early = _join(early, either._replace(log_total_Bht=jnp.where(precedes, either.log_total_Bht, MASKED)))
    late = _join(late, either._replace(log_total_Bht=jnp.where(precedes, MASKED, either.log_total_Bht)))
    late = _join(late, always)
    return Part(*(jnp.concatenate(halves, TOKENS) for halves in zip(early, late, strict=True)))


def finish(part: Part, q_BhtK: Array) -> tuple[Array, Array]:
    """Returns weighted values_BhtK and the logarithm of each row's denominator."""
    return part.values_BhtK.astype(q_BhtK.dtype), part.log_total_Bht


def add_gradients(
    sums: tuple, queries: Queries, values: Array, keys: tuple[Array, Array], step: int, mask: Mask, sizes: Sizes
) -> tuple[tuple, tuple[Array, Array]]:
    """Adds the part of a step's keys to (dq, None); returns the sums and (dk, dv) in float32.

    `values` are those of the complete row, as are the statistics of the queries.
    """
    dq, documents = sums[0], _documents_of(step, mask)
    rows = queries.q_BhTK, values, queries.log_total_BhT, queries.d_values_BhTK
    if step == 0:
        more, dk, dv = _differentiate(rows, keys, documents, True, sizes.cap)
        return (dq + more, None), (dk, dv)
    precedes = _visitor_precedes(step)
    stacked = tuple(_stack_queries(x, precedes) for x in rows), tuple(_stack_keys(x, precedes) for x in keys)
    more, dk, dv = _differentiate(*stacked, _stack_documents(documents, precedes), False, sizes.cap)
    return (dq + _unstack(more, precedes, 1), None), (_unstack(dk, precedes, 0), _unstack(dv, precedes, 0))


def _visitor_precedes(step: int) -> Array:
    """Returns whether the visitor of a step has an earlier chunk of the row than this shard."""
    return lax.axis_index(CP) >= step


def _stack_queries(x: Array, precedes: Array, axis: int = TOKENS) -> Array:
    """Returns, one below the other, the later chunk and the chunk of the second pair."""
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([late, jnp.where(precedes, early, late)])


def _stack_keys(x: Array, precedes: Array, axis: int = TOKENS) -> Array:
    """Returns, one below the other, the earlier chunk and the chunk of the second pair."""
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, jnp.where(precedes, early, late)])


def _unstack(x: Array, precedes: Array, always: int) -> Array:
    """Returns both chunks' gradients; the first pair's belongs to the chunk number `always`."""
    first, second = jnp.split(x, 2)
    chunks = [jnp.where(precedes, second, 0), jnp.where(precedes, 0, second)]
    chunks[always] = chunks[always] + first
    return jnp.concatenate(chunks, TOKENS)


def _documents_of(step: int, mask: Mask) -> tuple[Array, Array] | None:
    """Returns the documents of this shard's tokens and of the visitor's."""
    if mask.documents_BT is None:
        return None
    cp, shard = lax.axis_size(CP), lax.axis_index(CP)
    visitor = (shard - step) % cp
    return context.take(mask.documents_BT, shard, cp), context.take(mask.documents_BT, visitor, cp)


def _stack_documents(documents, precedes: Array):
    if documents is None:
        return None
    return _stack_queries(documents[0], precedes, 1), _stack_keys(documents[1], precedes, 1)


def _join(a: Part, b: Part) -> Part:
    """Returns attention to the keys of both parts."""
    largest = jnp.maximum(a.log_total_Bht, b.log_total_Bht)
    weight_a, weight_b = jnp.exp(a.log_total_Bht - largest), jnp.exp(b.log_total_Bht - largest)
    total = weight_a + weight_b
    values = a.values_BhtK * (weight_a / total)[..., None] + b.values_BhtK * (weight_b / total)[..., None]
    return Part(values, largest + jnp.log(total))


def _call(kernel, q: Array, documents, causal: bool, cap: float | None, **options):
    """Returns the kernel as a function of (q, k, v)."""
    tokens = q.shape[TOKENS]
    mask = kernel.mask_lib.CausalMask if causal else kernel.mask_lib.FullMask
    splash = make_splash(kernel, mask((tokens, tokens)), q.shape[1], cap, **options)
    if documents is None:
        return jax.vmap(splash)
    segments = kernel.SegmentIds(*documents)
    return lambda q, k, v: jax.vmap(splash)(q, k, v, segments)


def _attend(q, keys, documents, causal: bool, cap: float | None) -> Part:
    with typed_kernel(q) as kernel:
        values, (log_total,) = _call(kernel, q, documents, causal, cap, save_residuals=True)(q, *keys)
    return Part(values.astype(jnp.float32), log_total)


def _differentiate(rows, keys, documents, causal: bool, cap: float | None) -> list[Array]:
    """Returns the gradients in q, k and v of one call.

    The kernel keeps its values and statistics for its backward pass. Those of the complete row replace them, so
    that the weights are the complete row's, and the kernel's forward pass is never run.
    """
    q, values, log_total, d_values = rows
    inputs = q, *keys
    with typed_kernel(q) as kernel:
        _, pull_back = jax.vjp(_call(kernel, q, documents, causal, cap), *inputs)
        replaced = []

        def replace(saved):
            if not jnp.issubdtype(saved.dtype, jnp.floating) or any(saved is x for x in inputs):
                return saved
            replaced.append(saved.ndim)
            return {4: values, 3: log_total}[saved.ndim]

        pull_back = jax.tree.map(replace, pull_back)
        if sorted(replaced) != [3, 4]:
            raise RuntimeError(f"splash attention keeps values and statistics, got arrays of {replaced} dimensions")
        return [x.astype(jnp.float32) for x in pull_back(d_values)]
