"""Matrices stored as 4-bit codes, two in a byte, with a scale for each group of inputs; products convert in tiles.

Byte [i, o] has the codes of inputs 2i (the high bits) and 2i + 1 of output o. So bitsandbytes packs the weight
[outputs, inputs] of a torch.nn.Linear. A value is the level of its code times the scale of its group. The matrix is
frozen: products have gradients in the activations only.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.config.weight_keys import group_size
from shardformer.kernels import tiles

INT4_LEVELS = tuple(float(level) for level in range(-8, 8))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("levels",))
class PackedMatrix:
    """Codes [..., I/2, O], float32 scales [..., groups, O], and the 16 levels of the codes."""

    def __init__(self, codes: Array, scales: Array, levels: tuple[float, ...]):
        self.codes, self.scales, self.levels = codes, scales, levels

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the float matrix."""
        *outer, half, outputs = self.codes.shape
        return (*outer, 2 * half, outputs)

    def astype(self, dtype) -> Array:
        """Returns the dequantised matrix."""
        return dequantize(self.codes, self.scales, self.levels).astype(dtype)

    def multiply(self, x_BTI: Array) -> Array:
        """Returns x @ w in x's dtype."""
        return multiply(x_BTI, self)


def pack(codes: Array) -> Array:
    """Returns codes 0..15 of [..., I, O] as bytes [..., I/2, O]."""
    *outer, inputs, outputs = codes.shape
    pairs = codes.astype(jnp.uint8).reshape(*outer, inputs // 2, 2, outputs)
    return pairs[..., 0, :] << 4 | pairs[..., 1, :]


def unpack(packed: Array) -> Array:
    """Inverts `pack`."""
    *outer, half, outputs = packed.shape
    return jnp.stack([packed >> 4, packed & 15], axis=-2).reshape(*outer, 2 * half, outputs)


def split_groups(w: Array, size: int) -> Array:
    """Returns w [..., I, O] as [..., groups, size, O]."""
    *outer, inputs, outputs = w.shape
    return w.reshape(*outer, inputs // size, size, outputs)


def quantize_int4(w: Array) -> tuple[Array, Array]:
    """Returns the packed codes of w [..., I, O], and their bfloat16 scales [..., groups, O].

    The largest value of a group, with its sign, has code 0, whose level is -8.
    """
    groups = split_groups(w.astype(jnp.float32), group_size(w.shape[-2]))
    largest, smallest = groups.max(-2, keepdims=True), groups.min(-2, keepdims=True)
    scales = (jnp.where(largest >= -smallest, largest, smallest) * -0.125).astype(jnp.bfloat16)
    exact = scales.astype(jnp.float32)
    codes = jnp.clip(jnp.round(groups * (1 / jnp.where(exact == 0, 1, exact))), -8, 7) + 8
    return pack(codes.reshape(w.shape)), scales[..., 0, :]


def take_groups(scales: Array, group: int, first: Array | int, rows: int) -> Array:
    """Returns the scales of rows `first`, `first + 1`... as those of smaller groups, which divide these rows."""
    part = math.gcd(group, rows)
    return scales[..., (first + part * jnp.arange(rows // part)) // group, :]


def dequantize(codes: Array, scales: Array, levels: tuple[float, ...]) -> Array:
    """Returns the float32 matrix of packed codes."""
    values = _look_up(unpack(codes), levels)
    groups = split_groups(values, values.shape[-2] // scales.shape[-2])
    return (groups * scales.astype(jnp.float32)[..., None, :]).reshape(values.shape)


def _look_up(codes: Array, levels: tuple[float, ...]) -> Array:
    """Returns the level of each code.

    Chooses by each bit of the code: a CPU computes that for a vector of codes, and a gather for one at a time.
    """
    if levels == INT4_LEVELS:
        return codes.astype(jnp.float32) - 8
    values: list = [np.float32(level) for level in levels]
    for bit in range(4):
        is_set = (codes >> bit & 1).astype(bool)
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@jax.custom_vjp
def multiply(x_BTI: Array, w_IO: PackedMatrix) -> Array:
    """Returns x @ w in x's dtype."""
    x_NI = x_BTI.reshape(-1, x_BTI.shape[-1])
    size, rows = _tiles_of(w_IO, x_BTI.dtype)
    is_small = x_NI.shape[1] < 2 * size
    y_NO = x_NI @ w_IO.astype(x_BTI.dtype) if is_small else tiles.sum_over_inputs(x_NI, rows, size)
    return y_NO.reshape(*x_BTI.shape[:-1], y_NO.shape[-1])


def _multiply_forward(x_BTI, w_IO):
    return multiply(x_BTI, w_IO), w_IO


def _multiply_backward(w_IO, d_BTO):
    d_NO = d_BTO.reshape(-1, d_BTO.shape[-1])
    size, rows = _tiles_of(w_IO, d_BTO.dtype)
    inputs = w_IO.shape[0]
    is_small = inputs < 2 * size
    d_NI = d_NO @ w_IO.astype(d_BTO.dtype).T if is_small else tiles.join_outputs(d_NO, rows, inputs, size)
    return d_NI.reshape(*d_BTO.shape[:-1], inputs), None


multiply.defvjp(_multiply_forward, _multiply_backward)


def _tiles_of(w_IO: PackedMatrix, dtype) -> tuple[int, tiles.Rows]:
    """Returns the rows of a tile, which are full groups, and the function that converts some rows."""
    inputs, outputs = w_IO.shape
    group = inputs // w_IO.scales.shape[0]
    size = -(-tiles.rows_of_tile(outputs) // group) * group

    def rows(start, size):
        codes = lax.dynamic_slice_in_dim(w_IO.codes, start // 2, size // 2)
        scales = lax.dynamic_slice_in_dim(w_IO.scales, start // group, size // group)
        return dequantize(codes, scales, w_IO.levels).astype(dtype)

    return size, rows
