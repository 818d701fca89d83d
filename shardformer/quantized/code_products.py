"""Products of activations with stored codes, three for a CPU: by tiles, for one row, and for a few rows by digits.

Compilers of TPUs and GPUs convert codes inside a product. That of a CPU would store the complete float matrix before.

- Tiles: some rows of the codes are converted at a time, about as many as fit into the cache. All tiles are converted
  in a loop: XLA would convert a tile outside of it, which needs no activations, for all layers at the start of a
  program (107 MB in 12 layers of 768 x 3072).
- One row: codes are converted in registers, because a row reads them only once. A sum of products of slices becomes one
  loop over vectors. A slice for each term matters: a slice of several terms would be stored too. 12 layers of
  768 x 3072 and a table of 50,257 x 768 need a third of the CPU time that they need in float32. With int8
  instructions, digits multiply a table instead.
- Digits: a row is split into int8 digits, row = scale * (d0 + d1/254 + d2/254**2), for the int8 products that CPUs have
  instructions for. Integer sums are exact, so the result is as close to the exact one as a float32 product (1.2e-7 of
  the largest for 768 x 3072 codes, and 8e-7). 16 rows times 50,304 x 768 codes take 9 to 15 ms on two cores, and 19 to
  20 ms in float32. One row times a table of 49,152 x 576 takes 1.3 ms by digits on two threads, and 3.0 in registers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.collectives import vary_like

# Elements of a tile that a CPU converts to float at once: 1 MB in float32, about half of a core's second-level cache.
TILE_ELEMENTS = 1 << 18
TILE_ROWS = 64  # rows of a tile are a multiple of this number, unless others divide the matrix

RUN = 24_576  # bytes of adjacent rows in one term: a CPU prefetches long runs; those of 768 bytes need twice the time
TERMS = 4  # that are added up in registers: 8 runs of full pages and the sums need 9 lines of a set of 8 of the cache
LANES = 32  # partial sums of each row of a table
MOST_TERMS = 64  # of a table's row
TABLE_ROWS = 2048  # whose partial sums are computed at once

LARGEST_DIGIT = 127
BASE = np.float32(2 * LARGEST_DIGIT)
DIGITS = {"float32": 3, "bfloat16": 2}  # as many as the dtype's precision needs
MOST_ROWS_OF_DIGITS = 64  # with more, jaxlib 0.10 needs as long as for the float32 product


def rows_of_tile(columns: int) -> int:
    """Returns the most rows of a tile with so many columns."""
    return max(TILE_ELEMENTS // columns // TILE_ROWS, 1) * TILE_ROWS


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


def multiply_row(x_1I: Array, codes_IO: Array) -> Array:
    """Returns the float32 product of a row and integer codes.

    Every step has as many terms. XLA would store the converted codes of a shorter last step: 2 of 18 terms of 576 x 576
    codes took twice as long as the other 16.
    """
    inputs, outputs = codes_IO.shape
    run = choose_run(inputs, outputs)
    codes_RrO, x_Rr1 = codes_IO.reshape(-1, run, outputs), x_1I.astype(jnp.float32).reshape(-1, run, 1)

    count = codes_RrO.shape[0]
    size = next((size for size in range(TERMS, 1, -1) if count % size == 0), 1)

    def step(i):
        terms = range(size)
        return sum(take(x_Rr1, i * size + j) * take(codes_RrO, i * size + j).astype(jnp.float32) for j in terms)

    return fold_rows(add_steps(step, count // size, (run, outputs), x_1I, codes_IO))


def multiply_row_by_table(x_1D: Array, codes_VD: Array) -> Array:
    """Returns the float32 products of a row and each row of a table of codes; `choose_lanes` accepts its width.

    Used where a CPU has no int8 products.
    """
    (entries, width), lanes = codes_VD.shape, choose_lanes(codes_VD.shape[1])
    rows, x_1D = min(TABLE_ROWS, entries), x_1D.astype(jnp.float32)

    def fill(i, y_VL):
        start = jnp.minimum(i * rows, entries - rows)  # the last rows overlap those before
        y_rL = sum(
            x_1D[:, first : first + lanes]
            * lax.dynamic_slice(codes_VD, (start, first), (rows, lanes)).astype(x_1D.dtype)
            for first in range(0, width, lanes)
        )
        return lax.dynamic_update_slice(y_VL, y_rL, (start, 0))

    empty_VL = vary_like(jnp.zeros((entries, lanes), x_1D.dtype), x_1D, codes_VD)
    return lax.fori_loop(0, -(-entries // rows), fill, empty_VL).sum(-1)[None]


def add_steps(step: Callable, count: int, shape: tuple[int, ...], *arrays: Array) -> Array:
    """Returns the float32 sum step(0) + step(1) + ... of a loop; its value varies over the axes of the arrays.

    A first step outside of the loop would be compiled a second time, which takes as long as the loop.
    """
    zeros = vary_like(jnp.zeros(shape, jnp.float32), *arrays)
    return lax.fori_loop(0, count, lambda i, total: total + step(i), zeros)


def fold_rows(x_rO: Array) -> Array:
    """Returns the sum of rows, whose number is a power of 2, as [1, O].

    Adds halves. XLA would sum over an axis by its library YNN, whose threads start for each product: the products of
    8 layers of SmolLM-135M took 4.4 ms of CPU time then, and take 3.3.
    """
    while x_rO.shape[0] > 1:
        half = x_rO.shape[0] // 2
        x_rO = x_rO[:half] + x_rO[half:]
    return x_rO


def take(x: Array, number: Array | int) -> Array:
    """Returns x[number], as a slice that joins the loop that reads it."""
    return lax.dynamic_slice_in_dim(x, number, 1)[0]


def choose_run(rows: int, columns: int) -> int:
    """Returns how many adjacent rows are one term: a power of 2 that divides the rows.

    At least two: to split codes into single rows, XLA of jaxlib 0.10 copies them for each token.
    """
    return math.gcd(rows, 1 << max(RUN // columns, 2).bit_length() - 1)


def choose_lanes(width: int) -> int:
    """Returns the partial sums of each row of a table of this width; 0 if it has too few factors of 2."""
    lanes = math.gcd(width, max(LANES, 1 << (width // LANES - 1).bit_length()))
    return lanes if width // lanes <= MOST_TERMS else 0


@functools.cache
def has_int8_products() -> bool:
    """Returns whether this CPU multiplies int8 matrices as they are; else XLA converts them to int32 first."""
    if jax.default_backend() != "cpu":
        return False
    rows, codes = (jax.ShapeDtypeStruct((size, 64), jnp.int8) for size in (2, 64))
    memory = jax.jit(contract, static_argnums=(2, 3)).lower(rows, codes, True, jnp.int32).compile().memory_analysis()
    return memory is not None and memory.temp_size_in_bytes < codes.size


def multiply_digits(x_NI: Array, codes: Array, transposed: bool, preferred=None) -> Array:
    """Returns the float32 product x @ codes, or x @ codes.T if `transposed`, as exact as `preferred` or as x."""
    count = DIGITS[jnp.dtype(preferred or x_NI.dtype).name]
    digits_CNI, scale_N1 = _split_digits(x_NI.astype(jnp.float32), count)
    y_CNO = contract(digits_CNI.reshape(-1, x_NI.shape[1]), codes, transposed, jnp.int32)
    y_CNO = y_CNO.astype(jnp.float32).reshape(count, x_NI.shape[0], -1)
    total_NO = y_CNO[-1]
    for y_NO in y_CNO[-2::-1]:
        total_NO = y_NO + total_NO / BASE
    return total_NO * scale_N1


def _split_digits(x_NI: Array, count: int) -> tuple[Array, Array]:
    """Returns int8 digits [count, N, I] of each row, the most significant first, and the scale [N, 1]."""
    scale_N1 = jnp.abs(x_NI).max(-1, keepdims=True) * np.float32(1 / LARGEST_DIGIT)
    rest_NI, digits = x_NI / jnp.where(scale_N1 > 0, scale_N1, 1), []
    for _ in range(count):
        digit_NI = jnp.round(rest_NI)
        digits.append(digit_NI.astype(jnp.int8))
        rest_NI = (rest_NI - digit_NI) * BASE
    return jnp.stack(digits), scale_N1
