"""The blocks of this shard's queries with blocks of any shard's keys: sums that further keys are added to.

A block has its number in the complete row. Masks, documents, windows, biases and dropout depend on these numbers only,
so that they are those of one device. Pairs of blocks that the causal mask or a window hides are not computed.
"""

import jax.numpy as jnp
from jax import Array, lax

from shardformer.kernels.blockwise_attention import (
    Queries,
    Running,
    Sight,
    Sizes,
    add_gradients,
    add_keys,
    join_blocks,
    no_keys,
    take_block,
)
from shardformer.kernels.varying import vary_like


def start(q_BhtK: Array, sizes: Sizes) -> Running:
    """Returns the softmax over no keys for each block of the queries: arrays of [blocks, B, h, block, ...]."""
    B, h, t, K = q_BhtK.shape
    return vary_like(no_keys((t // sizes.block, B, h, sizes.block, K)), q_BhtK)


def add_to_rows(
    running: Running, q_BhtK: Array, keys: tuple[Array, Array], numbers: tuple[Array, Array], sight: Sight, sizes: Sizes
) -> Running:
    """Adds keys and values to the softmax of all queries; `numbers` are those of the query and the key blocks."""
    (k, v), (number_n, number_m), block = keys, numbers, sizes.block

    def compute_rows(each):
        n, running_n = each
        i, q_n = number_n[n], take_block(q_BhtK, n, block)

        def add_block(m, running_n):
            return add_keys(running_n, q_n, k, v, m, sight, sizes, (i, number_m[m]))

        earliest = 0 if sight.window is None else jnp.maximum(i * block - sight.window + 1, 0) // block
        return lax.fori_loop((number_m < earliest).sum(), (number_m <= i).sum(), add_block, running_n)

    return Running(*lax.map(compute_rows, (jnp.arange(q_BhtK.shape[2] // block), running)))


def finish(running: Running, q_BhtK: Array) -> tuple[Array, Array]:
    """Returns weighted values_BhtK and the logarithm of each row's denominator."""
    values, largest, total = running
    return join_blocks((values / total[..., None]).astype(q_BhtK.dtype)), join_blocks(largest + jnp.log(total))


def start_gradients(q_BhtK: Array, sight: Sight) -> tuple[Array, Array | None]:
    """Returns zero gradients in the queries and in the bias, in float32."""
    bias = sight.bias_hT
    zeros = jnp.zeros(q_BhtK.shape), None if bias is None else jnp.zeros(bias.shape)
    return vary_like(zeros, q_BhtK)


def add_to_gradients(
    sums: tuple, queries: Queries, keys: tuple[Array, Array], numbers: tuple[Array, Array], sight: Sight, sizes: Sizes
) -> tuple[tuple, tuple[Array, Array]]:
    """Adds the part of these keys to (dq, d_bias); returns the sums and (dk, dv) of this shard's queries in float32."""
    (k, v), (number_n, number_m), block = keys, numbers, sizes.block
    zeros = vary_like((jnp.zeros((*k.shape[:2], block, k.shape[3])),) * 2, queries.q_BhTK)

    def compute_columns(sums, m):
        j, k_m, v_m = number_m[m], take_block(k, m, block), take_block(v, m, block)

        def add_block(n, sums):
            return add_gradients(sums, queries, n, k_m, v_m, sight, sizes, (number_n[n], j))

        end = number_n.size
        if sight.window is not None:
            end = (number_n <= (j * block + block + sight.window - 2) // block).sum()
        dq, d_bias, dk_m, dv_m = lax.fori_loop((number_n < j).sum(), end, add_block, (*sums, *zeros))
        return (dq, d_bias), (dk_m, dv_m)

    sums, gradients = lax.scan(compute_columns, sums, jnp.arange(number_m.size))
    return sums, (join_blocks(gradients[0]), join_blocks(gradients[1]))
