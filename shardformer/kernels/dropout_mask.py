"""Which elements dropout keeps: those of `jax.random.bernoulli`, bit for bit, and any part of them alone."""

import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of rounds 1 to 4, 5 to 8 and so on


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


def threefry(key, counter):
    """Threefry-2x32 (Salmon et al., 2011) of two words.

    Written out, it is one loop over the elements; JAX's own is twenty on a CPU, with an array in memory after each.
    """
    schedule = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x = x + y
            y = ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits))) ^ x
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x, y
