"""A reduce-scatter of sends between neighbours, which a TPU runs beside matrix products. Shard view.

The TPU's compiler has no asynchronous reduce-scatter: the products wait for the wire. Its collective-permutes are
asynchronous, and a ring of them sends the same bytes. Each device adds its own part to what it has received, which is
more memory traffic: 2.25 times the bytes of the gradient on a ring of 4.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

MOST = 16  # members of a ring; a longer ring is more operations than the compiler schedules well


def ring_scatter(
    x: Array, axis: str | tuple[str, ...], groups: Sequence[Sequence[int]], dimension: int, dtype: str
) -> Array:
    """Sums x over each group of indices of `axis`; every device keeps its float32 slice of `dimension`.

    x and the partial sums are rounded to `dtype` before they are read and sent. The additions are float32. Half of a
    slice goes around in each direction, so that all links are used.
    """
    x = x.astype(dtype)
    parts = 1 if x.shape[dimension] // len(groups[0]) % 2 else 2
    steps = (1, -1)[:parts]
    halves = [_pass_around(x, axis, groups, dimension, dtype, part, steps) for part in range(parts)]
    return lax.concatenate(halves, dimension)


def _pass_around(x, axis, groups, dimension, dtype, part, steps) -> Array:
    """Returns the sum of one part of this device's slice; the sum of a slice begins at the next member of the ring."""
    count, step, place = len(groups[0]), steps[part], _place_in_group(axis, groups)
    length = x.shape[dimension] // count // len(steps)

    def own(offset: int) -> Array:
        start = ((place + offset) % count * len(steps) + part) * length
        return lax.dynamic_slice_in_dim(x, start, length, dimension).astype(jnp.float32)

    pairs = [(group[i], group[(i + step) % count]) for group in groups for i in range(count)]
    total = own(-step)
    for hops in range(1, count):
        received = lax.ppermute(total.astype(dtype), axis, pairs)
        total = received.astype(jnp.float32) + own(-step * (1 + hops))
    return total


def _place_in_group(axis: str | tuple[str, ...], groups: Sequence[Sequence[int]]) -> Array:
    """Returns this device's position in its group."""
    places = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        places[list(group)] = range(len(group))
    return jnp.asarray(places)[lax.axis_index(axis)]
