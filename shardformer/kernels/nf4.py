"""The NF4 codes of QLoRA, and scales that are quantised too ("double quantisation"), as bitsandbytes computes them.

The scale of a group is its largest magnitude. All scales of a matrix, output by output, minus their mean, are quantised
in blocks of 256 to the 256 levels of a dynamic data type. `blocks` has the largest magnitude of each such block, and
the mean as its last element.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.config.weight_keys import group_size
from shardformer.kernels import packed

# The quantiles of a normal distribution, so that each code is equally frequent (QLoRA, appendix E).
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
BLOCK = 256  # scales that share a second scale
STEPS = 1 << 16  # bitsandbytes looks a normalised scale up in a table of so many steps


def quantize(w: Array) -> tuple[Array, Array, Array]:
    """Returns the packed codes of w [..., I, O], the codes [..., groups, O] of their scales, and `blocks`."""
    groups = packed.split_groups(w.astype(jnp.float32), group_size(w.shape[-2]))
    scales = jnp.abs(groups).max(-2)
    scaled = groups * (1 / jnp.where(scales > 0, scales, 1))[..., None, :]
    codes = sum((scaled > middle).astype(jnp.uint8) for middle in _middles(np.array(LEVELS, np.float32)))
    return packed.pack(codes.reshape(w.shape)), *_quantize_scales(scales)


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
