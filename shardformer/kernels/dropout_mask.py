"""The elements that dropout keeps: those of `jax.random.bernoulli`, bit for bit, or any part of them."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.kernels.threefry import threefry


def keep_mask(keys_Bh2: Array, rate: float, row_T: Array, column_S: Array, columns: int) -> Array:
    """Returns rows and columns of `jax.random.bernoulli(key, 1 - rate, (rows, columns))` for each key.

    Each number of the full array is one threefry word of its own counter; the array may have 2**32 numbers.
    """
    key = tuple(keys_Bh2[..., i, None, None] for i in range(2))
    counter_TS = (row_T[:, None] * columns + column_S[None, :]).astype(jnp.uint32)
    words = threefry(key, (jnp.zeros_like(counter_TS)[None, None], counter_TS[None, None]))
    bits = words[0] ^ words[1]
    uniform = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1
    return uniform < 1 - rate
