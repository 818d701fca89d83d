"""Matrices stored as 4-bit codes, two in a byte, with a scale for each group of inputs, and their products.

Byte [i, o] has the codes of inputs 2i (the high bits) and 2i + 1 of output o. So bitsandbytes packs the weight
[outputs, inputs] of a torch.nn.Linear. A value is the level of its code times the scale of its group. The matrix is
frozen: products have gradients in the activations only.

int4 has equal steps. nf4 has the codes of QLoRA, and scales that are quantised too ("double quantisation"), as
bitsandbytes computes them. The scale of a group is then its largest magnitude. All scales of a matrix, output by
output, minus their mean, are quantised in blocks of 256 to the 256 levels of a dynamic data type. `blocks` has the
largest magnitude of each such block, and the mean as its last element.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.quantized import code_products
from shardformer.quantized.part_keys import group_size

# Up to so many rows of activations, a tile is one group, whose product is scaled. 14M codes of int4 need 3 ms of a
# core for one row then, and 50 ms if the tile is scaled; those of nf4 need 7 and 31 ms.
FEW_ROWS = 16
LANES_OF_PAIRS = 256  # a TPU has 128 lanes: one for each pair
MOST_TERMS = 6  # of a step of the product of one row: 1,536 x 576 codes take 160 us then, and 235 in steps of one term
INT4_LEVELS = tuple(float(level) for level in range(-8, 8))
# The quantiles of a normal distribution, so that each code is equally frequent (QLoRA, appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
BLOCK = 256  # scales that share a second scale
STEPS = 1 << 16  # bitsandbytes looks a normalised scale up in a table of so many steps


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
    """Returns x @ w in x's dtype; sums are float32."""
    y_NO = _multiply(x_BTI.reshape(-1, x_BTI.shape[-1]), w_IO, _bytes_of_tile(w_IO))
    return y_NO.astype(x_BTI.dtype).reshape(*x_BTI.shape[:-1], -1)


@functools.partial(jax.jit, static_argnums=2)  # layers of equal shapes are lowered once
def _multiply(x_NI: Array, w_IO: PackedMatrix, size: int) -> Array:
    """Returns the float32 product; compilers of TPUs and GPUs convert inside it, or store one matrix at a time."""
    on_cpu = functools.partial(_multiply_on_cpu, size=size)
    on_tpu = functools.partial(_multiply_at_once, split=split_by_products)
    multiply_rows = functools.partial(lax.platform_dependent, cpu=on_cpu, tpu=on_tpu, default=_multiply_at_once)
    return code_products.fold_batches(multiply_rows)(x_NI, w_IO)


def split_by_slices(x_NI: Array) -> tuple[Array, Array]:
    """Returns the even and the odd inputs: a byte has the codes of two inputs."""
    x_NP2 = x_NI.reshape(x_NI.shape[0], -1, 2)
    return x_NP2[..., 0], x_NP2[..., 1]


def join_by_stack(even_NP: Array, odd_NP: Array) -> Array:
    """Inverts `split_by_slices`."""
    return jnp.stack([even_NP, odd_NP], axis=-1).reshape(even_NP.shape[0], -1)


def split_by_products(x_NI: Array) -> tuple[Array, Array]:
    """Returns the even and the odd inputs, as products with matrices that select them.

    A TPU's compiler estimates nine times as many cycles for slices of every second number. The barrier lets it
    dequantise inside the products of both halves; without it, it stores the float matrix.
    """
    rows, inputs = x_NI.shape
    if inputs % LANES_OF_PAIRS:
        return split_by_slices(x_NI)
    x_NBK = x_NI.reshape(rows, -1, LANES_OF_PAIRS)
    even_NP, odd_NP = (_select(x_NBK, each).reshape(rows, -1) for each in _selections())
    return lax.optimization_barrier((even_NP, odd_NP))


def join_by_products(even_NP: Array, odd_NP: Array) -> Array:
    """Inverts `split_by_products`."""
    rows, pairs = even_NP.shape
    if 2 * pairs % LANES_OF_PAIRS:
        return join_by_stack(even_NP, odd_NP)
    halves = lax.optimization_barrier((even_NP, odd_NP))
    # Blocks are rows: a TPU's compiler would transpose [rows, blocks, lanes], and all that it is multiplied by.
    both_RK = jnp.concatenate([half_NP.reshape(-1, LANES_OF_PAIRS // 2) for half_NP in halves], axis=-1)
    return _select(both_RK, jnp.concatenate(_selections(), axis=-1).T).reshape(rows, -1)


def _selections() -> tuple[Array, Array]:
    """Returns the matrices that select the even and the odd of adjacent inputs.

    NumPy's would be constants in the programs of all platforms.
    """
    shape = (LANES_OF_PAIRS, LANES_OF_PAIRS // 2)
    inputs, pairs = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return inputs == 2 * pairs, inputs == 2 * pairs + 1


def _select(x: Array, selection: Array) -> Array:
    # Exact for finite numbers: one term of a sum is not 0.
    return jnp.matmul(x, selection.astype(x.dtype), precision="highest")


def _multiply_at_once(x_NI: Array, w_IO: PackedMatrix, split: Callable = split_by_slices) -> Array:
    halves = zip(split(x_NI), _dequantize_halves(w_IO, 0, w_IO.codes.shape[0], x_NI.dtype), strict=True)
    high_NO, low_NO = (code_products.contract(x_NP, w_PO, False, jnp.float32) for x_NP, w_PO in halves)
    return high_NO + low_NO


def _multiply_on_cpu(x_NI: Array, w_IO: PackedMatrix, size: int) -> Array:
    rows = x_NI.shape[0]
    if rows == 1:
        return _multiply_row(x_NI, w_IO)
    few = rows <= FEW_ROWS
    return _multiply_tiles(x_NI, w_IO, few, _group(w_IO) // 2 if few else size)


def _multiply_row(x_1I: Array, w_IO: PackedMatrix) -> Array:
    """Returns the float32 product of one row; a part of a step has terms of one group."""
    half, outputs = _group(w_IO) // 2, w_IO.codes.shape[1]
    run = code_products.choose_run(half, outputs)
    size = math.gcd(half // run, code_products.TERMS)
    codes_RrO = w_IO.codes.reshape(-1, run, outputs)
    x_Rr2 = x_1I.astype(jnp.float32).reshape(-1, run, 2)  # a byte has the codes of two inputs
    if w_IO.levels == INT4_LEVELS:
        x_Rr2 = x_Rr2 / 16  # exact, for levels times 16

    def term(number):
        codes_rO, x_r2 = code_products.take(codes_RrO, number), code_products.take(x_Rr2, number)
        high_rO, low_rO = _look_up_both(codes_rO, w_IO.levels)
        return x_r2[:, :1] * high_rO + x_r2[:, 1:] * low_rO

    def part(number):
        scales_1O = lax.dynamic_slice_in_dim(w_IO.scales, number * size * run // half, 1)
        return sum(term(number * size + j) for j in range(size)) * scales_1O

    parts = codes_RrO.shape[0] // size
    together = next(count for count in range(max(MOST_TERMS // size, 1), 0, -1) if parts % count == 0)

    def step(i):
        return sum(part(i * together + j) for j in range(together))

    total_rO = code_products.add_steps(step, parts // together, (run, outputs), x_1I, w_IO.codes, w_IO.scales)
    return code_products.fold_rows(total_rO)


def _look_up_both(bytes_rO: Array, levels: tuple[float, ...]) -> tuple[Array, Array]:
    """Returns the levels of both codes of each byte; those of int4 times 16.

    With its first bit flipped, a code of int4 is its level as a signed number, and 16 times that in the high bits of an
    int8. So no float needs a subtraction: 576 x 1536 codes take 50 us of a core, and took 61.
    """
    if levels != INT4_LEVELS:
        return _look_up(bytes_rO >> 4, levels), _look_up(bytes_rO & 15, levels)
    signed_rO = lax.bitcast_convert_type(bytes_rO ^ np.uint8(0x88), jnp.int8)
    return (signed_rO & np.int8(-16)).astype(jnp.float32), (signed_rO << 4).astype(jnp.float32)


def _multiply_tiles(x_NI: Array, w_IO: PackedMatrix, few: bool, size: int) -> Array:
    """Returns the float32 product, for a tile of `size` rows of codes at a time; that of few rows is one group."""
    x_NP2 = x_NI.reshape(x_NI.shape[0], -1, 2)

    def multiply_tile(start):
        high_pO, low_pO, scales_GO = _values(w_IO, start, size)
        if not few:
            high_pO, low_pO = (_scale(values, scales_GO) for values in (high_pO, low_pO))
        x_Np2 = lax.dynamic_slice_in_dim(x_NP2, start, size, 1)
        factors = (x_Np2[..., 0], high_pO), (x_Np2[..., 1], low_pO)
        y_NO = sum(code_products.contract(x, values.astype(x.dtype), False, jnp.float32) for x, values in factors)
        return y_NO * scales_GO if few else y_NO  # the tile is one group

    shape = x_NI.shape[0], w_IO.codes.shape[1]
    return code_products.add_steps(
        lambda i: multiply_tile(i * size), w_IO.codes.shape[0] // size, shape, x_NI, w_IO.codes, w_IO.scales
    )


def _multiply_forward(x_BTI, w_IO):
    return multiply(x_BTI, w_IO), w_IO


def _multiply_backward(w_IO, d_BTO):
    d_NO = d_BTO.reshape(-1, d_BTO.shape[-1])
    multiply_rows = functools.partial(
        lax.platform_dependent,
        cpu=_multiply_transposed_tiles,
        tpu=_multiply_transposed_on_tpu,
        default=_multiply_transposed,
    )
    return code_products.fold_batches(multiply_rows)(d_NO, w_IO).reshape(*d_BTO.shape[:-1], -1), None


def _multiply_transposed(d_NO: Array, w_IO: PackedMatrix) -> Array:
    return join_by_stack(*_multiply_halves((d_NO, d_NO), w_IO))


def _multiply_transposed_on_tpu(d_NO: Array, w_IO: PackedMatrix) -> Array:
    # Of two arrays that it cannot know to be equal, the compiler dequantises inside both products; of one, before them.
    return join_by_products(*_multiply_halves(lax.optimization_barrier((d_NO, d_NO)), w_IO))


def _multiply_halves(gradients: tuple[Array, Array], w_IO: PackedMatrix) -> list[Array]:
    """Returns the gradients of the even and the odd inputs, each from one of two equal gradients of the outputs."""
    dtype = gradients[0].dtype
    halves = zip(gradients, _dequantize_halves(w_IO, 0, w_IO.codes.shape[0], dtype), strict=True)
    return [code_products.contract(d_NO, values_PO, True) for d_NO, values_PO in halves]


def _multiply_transposed_tiles(d_NO: Array, w_IO: PackedMatrix) -> Array:
    size = _bytes_of_tile(w_IO)

    def multiply_tile(i):
        halves = _dequantize_halves(w_IO, i * size, size, d_NO.dtype)
        return jnp.stack([code_products.contract(d_NO, values_pO, True) for values_pO in halves], axis=-1)

    d_tNp2 = lax.map(multiply_tile, jnp.arange(w_IO.codes.shape[0] // size))
    return jnp.moveaxis(d_tNp2, 0, 1).reshape(d_NO.shape[0], -1)


multiply.defvjp(_multiply_forward, _multiply_backward)


def _group(w_IO: PackedMatrix) -> int:
    return w_IO.shape[0] // w_IO.scales.shape[0]


def _bytes_of_tile(w_IO: PackedMatrix) -> int:
    """Returns the rows of codes in a tile: full groups, as many as divide the matrix."""
    groups, size = w_IO.scales.shape[0], _group(w_IO)
    least = -(-groups * size // max(code_products.rows_of_tile(w_IO.shape[1]), size))
    return groups // next(count for count in range(least, groups + 1) if groups % count == 0) * size // 2


def _values(w_IO: PackedMatrix, start: Array | int, size: int) -> tuple[Array, Array, Array]:
    """Returns the levels of the high and the low codes of some rows of bytes, and the scales of their groups."""
    half = _group(w_IO) // 2
    codes_pO = lax.dynamic_slice_in_dim(w_IO.codes, start, size)
    scales_GO = lax.dynamic_slice_in_dim(w_IO.scales, start // half, size // half)
    return _look_up(codes_pO >> 4, w_IO.levels), _look_up(codes_pO & 15, w_IO.levels), scales_GO


def _dequantize_halves(w_IO: PackedMatrix, start: Array | int, size: int, dtype) -> tuple[Array, Array]:
    """Returns the values of the high and the low codes of some rows of bytes: of even and odd inputs."""
    high_pO, low_pO, scales_GO = _values(w_IO, start, size)
    return _scale(high_pO, scales_GO).astype(dtype), _scale(low_pO, scales_GO).astype(dtype)


def _scale(values_pO: Array, scales_GO: Array) -> Array:
    groups = split_groups(values_pO, values_pO.shape[0] // scales_GO.shape[0])
    return (groups * scales_GO[:, None]).reshape(values_pO.shape)


def quantize_nf4(w: Array) -> tuple[Array, Array, Array]:
    """Returns the packed codes of w [..., I, O], the codes [..., groups, O] of their scales, and `blocks`."""
    groups = split_groups(w.astype(jnp.float32), group_size(w.shape[-2]))
    scales = jnp.abs(groups).max(-2)
    scaled = groups * (1 / jnp.where(scales > 0, scales, 1))[..., None, :]
    codes = sum((scaled > middle).astype(jnp.uint8) for middle in _middles(np.array(NF4_LEVELS, np.float32)))
    return pack(codes.reshape(w.shape)), *_quantize_scales(scales)


def dequantize_scales(codes: Array, blocks: Array, first: tuple[Array | int, Array | int], groups: int) -> Array:
    """Returns the float32 scales of their codes [..., G, O].

    `first` is the position of codes[..., 0, 0] among the `groups` and the outputs of the complete matrix.
    """
    group_G, output_O = (start + jnp.arange(size) for start, size in zip(first, codes.shape[-2:], strict=True))
    block_GO = (output_O[None] * groups + group_G[:, None]) // BLOCK
    levels = jnp.asarray(dynamic_levels())
    return levels[codes.astype(jnp.int32)] * blocks[..., block_GO] + blocks[..., -1:, None]


def dynamic_levels() -> np.ndarray:
    """Returns the 256 levels of bitsandbytes' dynamic data type: seven exponents, whose fractions have more bits."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = _linspace(2**exponent + 1)
        middles = ((edges[:-1] + edges[1:]) / np.float32(2)) * np.float32(10.0 ** (exponent - 6))
        levels += [*middles, *-middles]
    return np.sort(np.array(levels, np.float32))


def _linspace(count: int) -> np.ndarray:
    """Returns float32 steps from 0.1 to 1 as torch.linspace does: from the nearer end, each rounded once."""
    first, index = np.float32(0.1), np.arange(count)
    step = float((np.float32(1) - first) / np.float32(count - 1))
    rising, falling = float(first) + step * index, 1 - step * index[::-1]
    return np.where(index < count // 2, rising, falling).astype(np.float32)


def _middles(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1] + levels[1:]) * np.float32(0.5)


def _table_of_codes() -> np.ndarray:
    """Returns the code of each step from -1 to 1."""
    value = np.float32(-1) + np.float32(2) * np.arange(STEPS, dtype=np.float32) / np.float32(STEPS - 1)
    return np.searchsorted(_middles(dynamic_levels()), value, side="left").astype(np.uint8)


def _quantize_scales(scales: Array) -> tuple[Array, Array]:
    """Returns the codes [..., G, O] of the scales, and `blocks`."""
    *outer, groups, outputs = scales.shape
    flat = jnp.swapaxes(scales, -1, -2).reshape(*outer, groups * outputs)
    mean = mean_of_positives(flat)
    count = -(-flat.shape[-1] // BLOCK)
    padding = [(0, 0)] * len(outer) + [(0, count * BLOCK - flat.shape[-1])]
    centred = jnp.pad(flat - mean, padding).reshape(*outer, count, BLOCK)
    largest = jnp.abs(centred).max(-1)
    normalised = jnp.clip(centred * (1 / jnp.where(largest > 0, largest, 1))[..., None], -1, 1)
    step = ((normalised + 1) * 0.5 * (STEPS - 1) + 0.5).astype(jnp.int32)
    codes = jnp.where(largest[..., None] > 0, jnp.asarray(_table_of_codes())[step], jnp.uint8(0))
    codes = codes.reshape(*outer, -1)[..., : flat.shape[-1]].reshape(*outer, outputs, groups)
    return jnp.swapaxes(codes, -1, -2), jnp.concatenate([largest, mean], axis=-1)


def mean_of_positives(x: Array) -> Array:
    """Returns the mean over the last axis, of size 1 then, of at most 2**22 values; the same on every mesh.

    Adds up integers of 32 bits, whose sum does not depend on the order, and divides in steps of 8 bits.
    """
    exponent = lax.bitcast_convert_type(x.max(-1, keepdims=True), jnp.int32) >> 23
    exponent = jnp.maximum(exponent, 23)
    scaled = x * _power_of_two(277 - exponent)  # below 2**24
    integers = jnp.floor(scaled)
    fractions, integers = ((scaled - integers) * 256).astype(jnp.uint32), integers.astype(jnp.uint32)
    count, quotient, rest = np.uint32(x.shape[-1]), jnp.uint32(0), jnp.uint32(0)
    for digits in (integers >> 16, integers >> 8 & 255, integers & 255, fractions):
        part = (rest << 8) + digits.sum(-1, keepdims=True)
        quotient, rest = (quotient << 8) + part // count, part % count
    return quotient.astype(jnp.float32) * np.float32(1 / 256) * _power_of_two(exponent - 23)


def _power_of_two(exponent: Array) -> Array:
    """Returns the float32 with these exponent bits."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
