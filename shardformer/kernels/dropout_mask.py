"""Which elements dropout keeps: those of `jax.random.bernoulli`, bit for bit, and any part of them alone."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.kernels.threefry import threefry


def keep_mask(keys_Bh2, rate: float, row_T, column_S, columns: int):
    """Of the array `jax.random.bernoulli(key, 1 - rate, (rows, columns))` of each key, these rows and columns.

    Each number of that array is one threefry word of its own counter; there may be 2**32 of them.
    """
    key = tuple(keys_Bh2[..., i, None, None] for i in range(2))
    counter_TS = (row_T[:, None] * columns + column_S[None, :]).astype(jnp.uint32)
    words = threefry(key, (jnp.zeros_like(counter_TS)[None, None], counter_TS[None, None]))
    bits = words[0] ^ words[1]
    uniform = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1
    return uniform < 1 - rate
