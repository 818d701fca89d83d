"""Matrices stored as int8 codes with a scale for each output channel, and products without a float copy of them.

The dequantised matrix is `codes.astype(scales.dtype) * scales`, as that of Grok-1's QuantizedWeight8bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LARGEST_CODE = 127
UNIT = np.float32(1 / LARGEST_CODE)  # XLA would divide by a constant as it likes: by a product, or not
# Elements of a tile that a CPU converts to float at once: 1 MB in float32, about half of a core's second-level cache.
TILE_ELEMENTS = 1 << 18
ROWS = 64  # rows of a tile are a multiple of this number


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=())
class Int8Matrix:
    """The codes of a matrix, and scales that broadcast against them: of its columns, or of a table's rows."""

    def __init__(self, codes: Array, scales: Array):
        self.codes, self.scales = codes, scales

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the float matrix."""
        return self.codes.shape

    def astype(self, dtype) -> Array:
        """Returns the dequantised matrix."""
        return (self.codes.astype(self.scales.dtype) * self.scales).astype(dtype)

    def __getitem__(self, rows: Array) -> Array:
        """Returns dequantised rows of a table."""
        return self.codes[rows].astype(self.scales.dtype) * self.scales[rows]


def quantize(w: Array, axis: int) -> tuple[Array, Array]:
    """Returns the int8 codes of w and their float32 scales, whose size along the axis of the inputs is 1."""
    w = w.astype(jnp.float32)
    scales = jnp.max(jnp.abs(w), axis=axis, keepdims=True) * UNIT
    codes = jnp.round(w * (1 / jnp.where(scales > 0, scales, 1)))
    return jnp.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8), scales


def multiply(x_BTI: Array, w_IO: Int8Matrix) -> Array:
    """Returns x @ w in x's dtype; the scales multiply the product."""
    y_BTO = _multiply_codes(x_BTI, w_IO.codes, transposed=False)
    return (y_BTO.astype(jnp.float32) * _row(w_IO.scales, y_BTO)).astype(x_BTI.dtype)


def multiply_table(h_BTD: Array, table: Int8Matrix, tied: bool) -> Array:
    """Returns the float32 logits of a table [v, D] if it is tied, else [D, v]."""
    logits_BTv = _multiply_codes(h_BTD, table.codes, transposed=tied, preferred=jnp.float32)
    return logits_BTv * _row(table.scales, logits_BTv)


def _row(scales: Array, y: Array) -> Array:
    """Returns the scales of the last axis of y, which broadcast against it."""
    return scales.reshape((1,) * (y.ndim - 1) + (-1,))


def _multiply_codes(x_BTI: Array, codes: Array, transposed: bool, preferred=None) -> Array:
    """Returns the product with the float values of the codes; a CPU converts a tile at a time.

    Compilers of TPUs and GPUs convert inside the product. That of a CPU would store the complete float matrix.
    """
    x_NI = x_BTI.reshape(-1, x_BTI.shape[-1])
    y_NO = lax.platform_dependent(
        x_NI,
        codes,
        cpu=functools.partial(_multiply_tiles, transposed=transposed, preferred=preferred),
        default=functools.partial(_multiply_at_once, transposed=transposed, preferred=preferred),
    )
    return y_NO.reshape(*x_BTI.shape[:-1], y_NO.shape[-1])


def _multiply_at_once(x_NI, codes, transposed, preferred):
    contracted = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(x_NI, codes.astype(x_NI.dtype), contracted, preferred_element_type=preferred)


def _multiply_tiles(x_NI, codes, transposed, preferred):
    """Multiplies by some rows of the stored codes at a time, which are contiguous; the last tile has the rest."""
    size = max(TILE_ELEMENTS // codes.shape[1] // ROWS, 1) * ROWS
    if codes.shape[0] < 2 * size:
        return _multiply_at_once(x_NI, codes, transposed, preferred)
    return (_join_outputs if transposed else _sum_over_inputs)(x_NI, codes, size, preferred)


def _sum_over_inputs(x_NI, codes_IO, size, preferred):
    """Adds up the products with tiles of inputs, in float32."""

    def multiply_tile(start, size):
        tile = lax.dynamic_slice_in_dim(codes_IO, start, size)
        return _multiply_at_once(lax.dynamic_slice_in_dim(x_NI, start, size, 1), tile, False, jnp.float32)

    def add_tile(i, y_NO):
        return y_NO + multiply_tile(i * size, size)

    count = codes_IO.shape[0] // size
    y_NO = lax.fori_loop(1, count, add_tile, multiply_tile(0, size))
    if rest := codes_IO.shape[0] - count * size:
        y_NO = y_NO + multiply_tile(count * size, rest)
    return y_NO.astype(preferred or x_NI.dtype)


def _join_outputs(x_NI, codes_OI, size, preferred):
    """Concatenates the products with tiles of outputs."""

    def multiply_tile(i):
        return _multiply_at_once(x_NI, lax.dynamic_slice_in_dim(codes_OI, i * size, size), True, preferred)

    count = codes_OI.shape[0] // size
    y_tNo = lax.map(multiply_tile, jnp.arange(count))
    y_NO = jnp.moveaxis(y_tNo, 0, 1).reshape(x_NI.shape[0], count * size)
    if count * size == codes_OI.shape[0]:
        return y_NO
    rest = _multiply_at_once(x_NI, codes_OI[count * size :], True, preferred)
    return jnp.concatenate([y_NO, rest], axis=1)
