"""The grouped product of a TPU: JAX's Pallas kernels of MegaBlox, which read groups of any size.

libtpu 0.0.52 has a kernel for `lax.ragged_dot` on a v5p. On a v5e and a v6e it makes a dense product of it, with the
work of all experts for each row: 33M cycles instead of 0.2M for [8192, 2048] x [16, 2048, 768] (v5e, its estimate).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardformer.kernels.typed_pallas import typed_kernel

MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"
TILE_BYTES = 2048  # of a row of a tile: 1024 bfloat16 numbers; tiles of float32 would not fit into a TPU's scratchpad


class Kernel(NamedTuple):
    """The product by MegaBlox' kernels; the rows are padded to full tiles, their groups are not."""

    tile: int  # rows of a tile
    joins_rows: bool = False  # groups the tokens of all rows of a vmap together; see `join_rows`
    interpret: bool = False  # runs the kernel on any device, for tests
    block: int = 1

    def __str__(self) -> str:
        return f"a kernel with tiles of {self.tile} rows"

    def multiply(self, x_MI: Array, w_EIO: Array, size_E: Array) -> Array:
        """Returns each group of rows times its expert's matrix; rows after the last group have any values."""
        return multiply_by_kernel(x_MI, w_EIO, size_E, self.tile, self.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def multiply_by_kernel(x_MI: Array, w_EIO: Array, size_E: Array, tile: int, interpret: bool) -> Array:
    """Returns each group of rows times its expert's matrix, in the dtype of the rows."""
    return _multiply(x_MI, w_EIO, size_E, tile, interpret)


def _forward(x_MI, w_EIO, size_E, tile, interpret):
    return multiply_by_kernel(x_MI, w_EIO, size_E, tile, interpret), (x_MI, w_EIO, size_E)


def _backward(tile, interpret, saved, d_MO):
    x_MI, w_EIO, size_E = saved
    d_x_MI = _multiply(d_MO, w_EIO, size_E, tile, interpret, transpose_rhs=True)
    tiles = _choose_tiles(x_MI, d_MO.shape[1], tile)
    experts = w_EIO.shape[0]
    with typed_kernel(x_MI, MODULE) as kernel, jax.numpy_dtype_promotion("standard"):
        d_w_EIO = kernel.tgmm(x_MI.T, d_MO, size_E, w_EIO.dtype, tiles, num_actual_groups=experts, interpret=interpret)
    return d_x_MI, d_w_EIO, None


multiply_by_kernel.defvjp(_forward, _backward)


def _multiply(x_MI, w_EIO, size_E, tile, interpret, transpose_rhs=False):
    tiles = _choose_tiles(x_MI, w_EIO.shape[1 if transpose_rhs else 2], tile)
    with typed_kernel(x_MI, MODULE) as kernel, jax.numpy_dtype_promotion("standard"):
        return kernel.gmm(x_MI, w_EIO, size_E, x_MI.dtype, tiles, transpose_rhs=transpose_rhs, interpret=interpret)


def _choose_tiles(x_MI: Array, outputs: int, tile: int) -> tuple[int, int, int]:
    """Returns the sizes of a tile in rows, inputs and outputs."""
    most = TILE_BYTES // jnp.dtype(x_MI.dtype).itemsize
    return tile, min(most, x_MI.shape[1]), min(most, outputs)
