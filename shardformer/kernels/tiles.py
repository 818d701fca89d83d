"""Products with a stored matrix that is converted to float a tile of its rows at a time.

A CPU would store the complete float matrix of a conversion before a product. A tile is about as large as the cache.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

# Elements of a tile that a CPU converts to float at once: 1 MB in float32, about half of a core's second-level cache.
TILE_ELEMENTS = 1 << 18
ROWS = 64  # rows of a tile are a multiple of this number

Rows = Callable[[Array | int, int], Array]  # (first row, their number) -> these rows as floats


def rows_of_tile(columns: int) -> int:
    """Returns the number of rows of a tile with so many columns."""
    return max(TILE_ELEMENTS // columns // ROWS, 1) * ROWS


def contract(x_NI: Array, w: Array, transposed: bool, preferred=None) -> Array:
    """Returns x @ w, or x @ w.T if `transposed`."""
    contracted = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(x_NI, w, contracted, preferred_element_type=preferred)


def sum_over_inputs(x_NI: Array, rows: Rows, size: int, preferred=None) -> Array:
    """Returns x @ w: adds up, in float32, the products with `size` rows of w at a time; the last tile has the rest."""
    inputs = x_NI.shape[1]

    def multiply_tile(start, size):
        part_Ni = lax.dynamic_slice_in_dim(x_NI, start, size, 1)
        return contract(part_Ni, rows(start, size), False, jnp.float32)

    def add_tile(i, y_NO):
        return y_NO + multiply_tile(i * size, size)

    count = inputs // size
    y_NO = lax.fori_loop(1, count, add_tile, multiply_tile(0, size))
    if rest := inputs - count * size:
        y_NO = y_NO + multiply_tile(count * size, rest)
    return y_NO.astype(preferred or x_NI.dtype)


def join_outputs(x_NI: Array, rows: Rows, outputs: int, size: int, preferred=None) -> Array:
    """Returns x @ w.T: concatenates the products with `size` rows of w at a time; the last tile has the rest."""

    def multiply_tile(i):
        return contract(x_NI, rows(i * size, size), True, preferred)

    count = outputs // size
    y_tNo = lax.map(multiply_tile, jnp.arange(count))
    y_NO = jnp.moveaxis(y_tNo, 0, 1).reshape(x_NI.shape[0], count * size)
    if count * size == outputs:
        return y_NO
    rest = contract(x_NI, rows(count * size, outputs - count * size), True, preferred)
    return jnp.concatenate([y_NO, rest], axis=1)
