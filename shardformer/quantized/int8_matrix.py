"""Matrices stored as int8 codes with a scale for each output channel, and products without a float copy of them.

The dequantised matrix is `codes.astype(scales.dtype) * scales`, as that of Grok-1's QuantizedWeight8bit. It is frozen:
products have gradients in the activations only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.quantized import code_products

LARGEST_CODE = 127
UNIT = np.float32(1 / LARGEST_CODE)  # XLA would divide by a constant as it likes: by a product, or not


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

    def multiply(self, x_BTI: Array) -> Array:
        """Returns x @ w in x's dtype."""
        return multiply(x_BTI, self)


def quantize(w: Array, axis: int) -> tuple[Array, Array]:
    """Returns the int8 codes of w and their float32 scales, whose size along the axis of the inputs is 1."""
    w = w.astype(jnp.float32)
    scales = jnp.max(jnp.abs(w), axis=axis, keepdims=True) * UNIT
    codes = jnp.round(w * (1 / jnp.where(scales > 0, scales, 1)))
    return jnp.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8), scales


@jax.custom_vjp
def multiply(x_BTI: Array, w_IO: Int8Matrix) -> Array:
    """Returns x @ w in x's dtype; the scales multiply the product."""
    y_BTO = _multiply_codes(x_BTI, w_IO.codes, transposed=False)
    return (y_BTO.astype(jnp.float32) * _row(w_IO.scales, y_BTO)).astype(x_BTI.dtype)


def _multiply_forward(x_BTI, w_IO):
    return multiply(x_BTI, w_IO), w_IO


def _multiply_backward(w_IO, d_BTO):
    scaled_BTO = (d_BTO.astype(jnp.float32) * _row(w_IO.scales, d_BTO)).astype(d_BTO.dtype)
    return _multiply_codes(scaled_BTO, w_IO.codes, transposed=True), None


multiply.defvjp(_multiply_forward, _multiply_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply_table(h_BTD: Array, table: Int8Matrix, tied: bool) -> Array:
    """Returns the float32 logits of a table [v, D] if it is tied, else [D, v]."""
    logits_BTv = _multiply_codes(h_BTD, table.codes, transposed=tied, preferred=jnp.float32)
    return logits_BTv * _row(table.scales, logits_BTv)


def _table_forward(h_BTD, table, tied):
    return multiply_table(h_BTD, table, tied), (table, h_BTD[:0])


def _table_backward(tied, saved, d_BTv):
    table, like = saved
    scaled_BTv = (d_BTv * _row(table.scales, d_BTv)).astype(like.dtype)
    return _multiply_codes(scaled_BTv, table.codes, transposed=not tied), None


multiply_table.defvjp(_table_forward, _table_backward)


def _row(scales: Array, y: Array) -> Array:
    """Returns the scales of the last axis of y, which broadcast against it."""
    return scales.reshape((1,) * (y.ndim - 1) + (-1,))


def _multiply_codes(x_BTI: Array, codes: Array, transposed: bool, preferred=None) -> Array:
    return _multiply_on_device(x_BTI, codes, transposed, preferred, code_products.rows_of_tile(codes.shape[1]))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))  # layers of equal shapes are lowered once
def _multiply_on_device(x_BTI: Array, codes: Array, transposed: bool, preferred, most_rows: int) -> Array:
    """Returns the product with the float values of the codes.

    Compilers of TPUs and GPUs convert inside the product. That of a CPU would store the complete float matrix.
    """
    on_cpu = functools.partial(_multiply_on_cpu, transposed=transposed, preferred=preferred, most_rows=most_rows)
    elsewhere = functools.partial(_multiply_at_once, transposed=transposed, preferred=preferred)
    multiply_rows = code_products.fold_batches(functools.partial(lax.platform_dependent, cpu=on_cpu, default=elsewhere))
    y_NO = multiply_rows(x_BTI.reshape(-1, x_BTI.shape[-1]), codes)
    return y_NO.reshape(*x_BTI.shape[:-1], y_NO.shape[-1])


def _multiply_at_once(x_NI, codes, transposed, preferred):
    return code_products.contract(x_NI, codes.astype(x_NI.dtype), transposed, preferred)


def _multiply_on_cpu(x_NI, codes, transposed, preferred, most_rows):
    rows = x_NI.shape[0]
    if rows == 1 and not transposed:
        y_NO = code_products.multiply_row(x_NI, codes)
    elif rows <= code_products.MOST_ROWS_OF_DIGITS and code_products.has_int8_products():
        y_NO = code_products.multiply_digits(x_NI, codes, transposed, preferred)
    elif rows == 1 and code_products.choose_lanes(codes.shape[1]):
        y_NO = code_products.multiply_row_by_table(x_NI, codes)
    else:
        return _multiply_tiles(x_NI, codes, transposed, preferred, most_rows)
    return y_NO.astype(preferred or x_NI.dtype)


def _multiply_tiles(x_NI, codes, transposed, preferred, most_rows):
    """Multiplies by some rows of the stored codes at a time, which are contiguous."""
    if codes.shape[0] < 2 * most_rows:
        return _multiply_at_once(x_NI, codes, transposed, preferred)
    multiply_tiles = code_products.join_outputs if transposed else code_products.sum_over_inputs
    return multiply_tiles(x_NI, codes, most_rows, preferred)
