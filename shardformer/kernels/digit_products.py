"""Products of a few rows of activations with int8 codes, as the int8 products that CPUs have instructions for.

A row is split into int8 digits: row = scale * (d0 + d1/254 + d2/254**2). Integer sums are exact, so the result is as
close to the exact one as a float32 product (1.2e-7 of the largest for 768 x 3072 codes, and 8e-7). Before a float32
product, a CPU would convert and store the codes: 16 rows times 50,304 x 768 codes take 19 to 20 ms on two cores, and 9
to 15 ms with digits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LARGEST_DIGIT = 127
BASE = np.float32(2 * LARGEST_DIGIT)
DIGITS = {"float32": 3, "bfloat16": 2}  # as many as the dtype's precision needs
MOST_ROWS = 64  # with more, jaxlib 0.10 needs as long as for the float32 product


@functools.cache
def is_available() -> bool:
    """Returns whether this CPU multiplies int8 matrices as they are; else XLA converts them to int32 first."""
    if jax.default_backend() != "cpu":
        return False
    rows, codes = (jax.ShapeDtypeStruct((size, 64), jnp.int8) for size in (2, 64))
    memory = jax.jit(_contract, static_argnums=2).lower(rows, codes, True).compile().memory_analysis()
    return memory is not None and memory.temp_size_in_bytes < codes.size


def multiply(x_NI: Array, codes: Array, transposed: bool) -> Array:
    """Returns the float32 product x @ codes, or x @ codes.T if `transposed`."""
    count = DIGITS[x_NI.dtype.name]
    digits_CNI, scale_N1 = _split(x_NI.astype(jnp.float32), count)
    y_CNO = _contract(digits_CNI.reshape(-1, x_NI.shape[1]), codes, transposed)
    y_CNO = y_CNO.astype(jnp.float32).reshape(count, x_NI.shape[0], -1)
    total_NO = y_CNO[-1]
    for y_NO in y_CNO[-2::-1]:
        total_NO = y_NO + total_NO / BASE
    return total_NO * scale_N1


def _split(x_NI: Array, count: int) -> tuple[Array, Array]:
    """Returns int8 digits [count, N, I] of each row, the most significant first, and the scale [N, 1]."""
    scale_N1 = jnp.abs(x_NI).max(-1, keepdims=True) * np.float32(1 / LARGEST_DIGIT)
    rest_NI, digits = x_NI / jnp.where(scale_N1 > 0, scale_N1, 1), []
    for _ in range(count):
        digit_NI = jnp.round(rest_NI)
        digits.append(digit_NI.astype(jnp.int8))
        rest_NI = (rest_NI - digit_NI) * BASE
    return jnp.stack(digits), scale_N1


def _contract(x_NI: Array, codes: Array, transposed: bool) -> Array:
    contracted = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(x_NI, codes, contracted, preferred_element_type=jnp.int32)
