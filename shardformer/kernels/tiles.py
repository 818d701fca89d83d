"""Products with a stored matrix of codes that is converted to float a tile of its rows at a time.

A CPU would store the complete float matrix of a conversion before a product. A tile is about as large as the cache.
All tiles are converted in a loop: XLA would convert a tile outside of it, which needs no activations, for all layers
at the start of a program (107 MB in 12 layers of 768 x 3072).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.collectives import vary_like

# Elements of a tile that a CPU converts to float at once: 1 MB in float32, about half of a core's second-level cache.
TILE_ELEMENTS = 1 << 18
ROWS = 64  # rows of a tile are a multiple of this number, unless others divide the matrix


def rows_of_tile(columns: int) -> int:
    """Returns the most rows of a tile with so many columns."""
    return max(TILE_ELEMENTS // columns // ROWS, 1) * ROWS


def count_tiles(rows: int, most: int) -> int:
    """Returns the number of tiles of at most `most` rows: one that divides the rows, unless it were twice as many."""
    least = -(-rows // most)
    return next((count for count in range(least, 2 * least) if rows % count == 0), least)


def contract(x_NI: Array, w: Array, transposed: bool, preferred=None) -> Array:
    """Returns x @ w, or x @ w.T if `transposed`."""
    contracted = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(x_NI, w, contracted, preferred_element_type=preferred)


def sum_over_inputs(x_NI: Array, codes_IO: Array, most_rows: int, preferred=None) -> Array:
    """Returns x @ codes: adds up, in float32, the products with a tile of at most so many rows at a time."""
    inputs, outputs = codes_IO.shape
    count = count_tiles(inputs, most_rows)
    size = -(-inputs // count)

    def add_tile(i, y_NO):
        start = jnp.minimum(i * size, inputs - size)  # the last tile overlaps the one before, if no size divides
        part_Ni = lax.dynamic_slice_in_dim(x_NI, start, size, 1)
        if count * size > inputs:
            part_Ni = jnp.where(start + jnp.arange(size)[None] >= i * size, part_Ni, 0)
        rows_iO = lax.dynamic_slice_in_dim(codes_IO, start, size).astype(x_NI.dtype)
        return y_NO + contract(part_Ni, rows_iO, False, jnp.float32)

    zeros_NO = vary_like(jnp.zeros((x_NI.shape[0], outputs), jnp.float32), x_NI, codes_IO)
    return lax.fori_loop(0, count, add_tile, zeros_NO).astype(preferred or x_NI.dtype)


def join_outputs(x_NI: Array, codes_OI: Array, most_rows: int, preferred=None) -> Array:
    """Returns x @ codes.T: joins the products with a tile of at most so many rows at a time."""
    outputs = codes_OI.shape[0]
    count = count_tiles(outputs, most_rows)
    size = -(-outputs // count)

    def fill_tile(i, y_NO):
        start = jnp.minimum(i * size, outputs - size)  # the last tile overlaps the one before, if no size divides
        rows_oI = lax.dynamic_slice_in_dim(codes_OI, start, size).astype(x_NI.dtype)
        return lax.dynamic_update_slice_in_dim(y_NO, contract(x_NI, rows_oI, True, preferred), start, 1)

    zeros_NO = vary_like(jnp.zeros((x_NI.shape[0], outputs), preferred or x_NI.dtype), x_NI, codes_OI)
    return lax.fori_loop(0, count, fill_tile, zeros_NO)


def fold_batches(product: Callable) -> Callable:
    """Returns product(x_NI, w) so that `vmap` over x multiplies the rows of all examples at once.

    A CPU's fastest program depends on the number of rows, and a mapped function knows only those of one example.
    """

    @jax.custom_batching.custom_vmap
    def multiply(x_NI: Array, w: Any) -> Array:
        return product(x_NI, w)

    @multiply.def_vmap
    def multiply_batch(examples: int, batched: Any, x_BNI: Array, w: Any) -> tuple[Array, bool]:
        if any(jax.tree.leaves(batched[1])):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
            return jax.vmap(product, in_axes=axes)(x_BNI, w), True
        y_NO = multiply(x_BNI.reshape(-1, x_BNI.shape[-1]), w)
        return y_NO.reshape(examples, -1, y_NO.shape[-1]), True

    return multiply
