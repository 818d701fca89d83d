"""Products of one row of activations with stored codes, written so that a CPU converts codes in registers.

Before a `dot`, XLA's CPU compiler stores the converted codes, and a row reads them only once. A sum of products of
slices becomes one loop over vectors. A slice for each term matters: a slice of several terms would be stored too.
12 layers of 768 x 3072 and a table of 50,257 x 768 need a third of the CPU time that they need in float32.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from shardformer.collectives import vary_like

RUN = 12_288  # bytes of adjacent rows in one term: a CPU prefetches long runs; those of 768 bytes need twice the time
TERMS = 8  # that are added up in registers: of 16 on, the addresses do not fit into registers
LANES = 32  # partial sums of each row of a table
MOST_TERMS = 64  # of a table's row
TABLE_ROWS = 2048  # whose partial sums are computed at once


def multiply(x_1I: Array, codes_IO: Array) -> Array:
    """Returns the float32 product of a row and integer codes."""
    inputs, outputs = codes_IO.shape
    run = choose_run(inputs, outputs)
    codes_RrO, x_Rr1 = codes_IO.reshape(-1, run, outputs), x_1I.astype(jnp.float32).reshape(-1, run, 1)

    def step(first, size=TERMS):
        return sum(take(x_Rr1, first + i) * take(codes_RrO, first + i).astype(jnp.float32) for i in range(size))

    count, rest = divmod(inputs // run, TERMS)
    y_rO = add_steps(lambda i: step(i * TERMS), count, (run, outputs), x_1I, codes_IO)
    if rest:
        y_rO = y_rO + step(count * TERMS, rest)
    return y_rO.sum(0, keepdims=True)


def multiply_by_rows(x_1D: Array, codes_VD: Array) -> Array:
    """Returns the float32 products of a row and each row of a table of codes; `choose_lanes` accepts its width."""
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


def take(x: Array, number: Array | int) -> Array:
    """Returns x[number], as a slice that joins the loop that reads it."""
    return lax.dynamic_slice_in_dim(x, number, 1)[0]


def choose_run(rows: int, columns: int, most: int = RUN) -> int:
    """Returns how many adjacent rows are one term: a power of 2 that divides the rows.

    At least two: to split codes into single rows, XLA of jaxlib 0.10 copies them for each token.
    """
    return math.gcd(rows, 1 << max(most // columns, 2).bit_length() - 1)


def choose_lanes(width: int) -> int:
    """Returns the partial sums of each row of a table of this width; 0 if it has too few factors of 2."""
    lanes = math.gcd(width, max(LANES, 1 << (width // LANES - 1).bit_length()))
    return lanes if width // lanes <= MOST_TERMS else 0
