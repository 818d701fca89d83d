"""Random keys and bits of threefry2x32, bitwise as JAX draws them."""

import math

import jax
import numpy as np
from numpy import ndarray

from shardformer.exact.elementwise import align
from shardformer.exact.operations import KEY, Operation, rule

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = np.uint32(0x1BD11BDA)


def threefry(key_high, key_low, high, low) -> tuple[ndarray, ndarray]:
    """Returns the two words of threefry2x32, of 20 rounds, for keys and counters of 32-bit words."""
    with np.errstate(over="ignore"):
        keys = np.asarray(key_high), np.asarray(key_low), key_high ^ key_low ^ PARITY
        x, y = high + keys[0], low + keys[1]
        for i in range(5):
            for rotation in ROTATIONS[i % 2]:
                x = x + y
                y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
                y = y ^ x
            x = x + keys[(i + 1) % 3]
            y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def make_key(high: ndarray, low: ndarray) -> ndarray:
    """Returns keys of two words."""
    result = np.empty(np.broadcast_shapes(high.shape, low.shape), KEY)
    result["high"], result["low"] = high, low
    return result


@rule("threefry2x32")
def threefry_of_words(operation: Operation, *words):
    return threefry(*words)


@rule("random_seed")
def seed(operation: Operation, seeds):
    _check(operation)
    wide = seeds.astype(np.int64).view(np.uint64) if seeds.dtype.itemsize == 8 else seeds.astype(np.uint32)
    high = (wide >> np.uint64(32)).astype(np.uint32) if wide.dtype == np.uint64 else np.zeros_like(wide)
    return make_key(high, wide.astype(np.uint32))


@rule("random_wrap")
def wrap(operation: Operation, words):
    _check(operation)
    return make_key(words[..., 0], words[..., 1])


@rule("random_unwrap")
def unwrap(operation: Operation, keys):
    return np.stack([keys["high"], keys["low"]], -1)


@rule("random_clone")
def clone(operation: Operation, keys):
    return keys


@rule("random_fold_in")
def fold_in(operation: Operation, *arrays):
    keys, data = align(operation, arrays)
    return make_key(*threefry(keys["high"], keys["low"], np.uint32(0), data.astype(np.uint32)))


@rule("random_split")
def split_keys(operation: Operation, keys):
    shape = tuple(operation.params["shape"])
    if _is_partitionable():
        return make_key(*_draw_pairs(keys, shape))
    words = _draw_halves(keys, 2 * math.prod(shape)).reshape((*keys.shape, *shape, 2))
    return make_key(words[..., 0], words[..., 1])


@rule("random_bits")
def bits(operation: Operation, keys):
    shape, width = tuple(operation.params["shape"]), operation.params["bit_width"]
    if not _is_partitionable():
        return _draw_unpartitionable(keys, shape, width)
    x, y = _draw_pairs(keys, shape)
    if width == 64:
        return (x.astype(np.uint64) << np.uint64(32)) | y.astype(np.uint64)
    mixed = x ^ y
    return mixed.astype(f"u{width // 8}") if width < 32 else mixed


def _is_partitionable() -> bool:
    return bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]  # JAX defines it at run time


def _draw_pairs(keys: ndarray, shape: tuple[int, ...]) -> tuple[ndarray, ndarray]:
    """Returns two words for each position of `shape`, from the position's number."""
    count = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    keys = keys.reshape((*keys.shape, *[1] * len(shape)))
    high, low = (count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32)
    return threefry(keys["high"], keys["low"], high, low)


def _draw_halves(keys: ndarray, count: int) -> ndarray:
    """Returns `count` words [*keys, count], of counters whose halves are encrypted together: JAX's first algorithm."""
    keys, half = keys[..., None], -(-count // 2)
    counters = np.arange(2 * half, dtype=np.uint32)
    counters[count:] = 0
    words = threefry(keys["high"], keys["low"], counters[:half], counters[half:])
    return np.concatenate(words, -1)[..., :count]


def _draw_unpartitionable(keys: ndarray, shape: tuple[int, ...], width: int) -> ndarray:
    """Returns random bits as JAX draws them with jax_threefry_partitionable=False."""
    size = math.prod(shape)
    if width == 64:
        words = _draw_halves(keys, 2 * size).astype(np.uint64)
        result = (words[..., :size] << np.uint64(32)) | words[..., size:]
    elif width == 32:
        result = _draw_halves(keys, size)
    else:
        words = _draw_halves(keys, -(-size * width // 32))
        parts = words[..., None] >> (np.uint32(width) * np.arange(32 // width, dtype=np.uint32))
        result = parts.reshape((*keys.shape, -1))[..., :size].astype(f"u{width // 8}")
    return result.reshape((*keys.shape, *shape))


def _check(operation: Operation) -> None:
    implementation = str(operation.params.get("impl", "threefry2x32"))
    if "fry" not in implementation:
        raise NotImplementedError(f"keys of {implementation}; use jax.random.key(seed, impl='threefry2x32')")
