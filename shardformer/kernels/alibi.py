"""ALiBi's slopes (Press et al., 2021): a head's attention logits fall by its slope with each token of distance."""

import math

import numpy as np


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns each head's slope, as transformers computes it for BLOOM.

    Of P heads, a power of two, head i has 2**(-8 * i / P). Further heads take every other slope of 2P heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = np.float32(2 ** (-8 / power)) ** np.arange(1, power + 1, dtype=np.float32)
    between = np.float32(2 ** (-4 / power)) ** np.arange(1, 2 * (heads - power), 2, dtype=np.float32)
    return np.concatenate([slopes, between])
