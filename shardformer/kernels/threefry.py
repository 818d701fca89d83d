"""JAX's default random numbers, bit for bit, as one loop over their elements.

On a CPU, JAX writes them as loops over the rounds with an array in memory after each round. Initialisation then took
two to three times as long to compile, and twice the memory of the parameters. A dropout mask is any part of the
elements that `jax.random.bernoulli` keeps.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import define_prng_impl

STANDARD = "threefry2x32"  # JAX's implementation by its name: a user may have changed the default
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of rounds 1 to 4, 5 to 8 and so on


def threefry(key: tuple[Array, ...], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Computes Threefry-2x32 (Salmon et al., 2011) of two words."""
    schedule = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x = x + y
            y = ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits))) ^ x
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def keep_mask(keys_Bh2: Array, rate: float, row_T: Array, column_S: Array, columns: int) -> Array:
    """Returns rows and columns of `jax.random.bernoulli(key, 1 - rate, (rows, columns))` for each key.

    Each number of the full array is one threefry word of a separate counter; the array may have 2**32 numbers.
    """
    key = tuple(keys_Bh2[..., i, None, None] for i in range(2))
    counter_TS = (row_T[:, None] * columns + column_S[None, :]).astype(jnp.uint32)
    words = threefry(key, (jnp.zeros_like(counter_TS)[None, None], counter_TS[None, None]))
    bits = words[0] ^ words[1]
    uniform = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1
    return uniform < 1 - rate


def random_bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    """Draws the bits of `jax.random.bits` from a key's two words."""
    if width > 32 or math.prod(shape) >= 2**32:  # numbers or counters of two words
        return jax.random.bits(_wrap_for_jax(key), shape, f"uint{width}")
    first, second = _words(key, shape)
    return (first ^ second).astype(f"uint{width}")


@functools.partial(jax.jit, static_argnums=1)  # traced once for all arrays of a shape
def _words(key, shape):
    """Computes the two words of the counters 0, 1, 2, ..., in this shape."""
    count = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        count += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]))
    key = tuple(key[i].reshape((1,) * len(shape)) for i in range(2))
    return threefry(key, (jnp.zeros_like(count), count))


def _wrap_for_jax(key):
    return jax.random.wrap_key_data(key, impl=STANDARD)


def split(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns the words of `jax.random.split` from those of a key."""
    return lax.optimization_barrier(jnp.stack(_words(key, shape), axis=-1))


def fold_in(key: Array, data: Any) -> Array:
    """Returns the words of `jax.random.fold_in` from those of a key, and a uint32 array."""
    return lax.optimization_barrier(jnp.stack(threefry((key[0], key[1]), (jnp.zeros_like(data), data))))


# For `impl=` of jax.random.key. JAX's own loops took half of the compilation of a model's first parameters, though
# they compute only keys.
THREEFRY = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=STANDARD)),
    split=split,
    fold_in=fold_in,
    random_bits=random_bits,
    name="threefry2x32_in_one_loop",
    tag="fry1",
)
