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
    slice goes around in each direction, so that all links are used; two members have only one link.
    """
    x = x.astype(dtype)
    halved = _find_even(x.shape, dimension, len(groups[0]))
    if halved is None or len(groups[0]) == 2:
        return _pass_around(x, axis, groups, dimension, dtype, 1, ())
    halves = [_pass_around(x, axis, groups, dimension, dtype, 1 - 2 * half, (halved, half)) for half in range(2)]
    return lax.concatenate(halves, halved)


def _find_even(shape: tuple[int, ...], dimension: int, count: int) -> int | None:
    """Returns the first dimension, from the scattered one on, along which a slice has two halves."""
    slice_ = [size // count if i == dimension else size for i, size in enumerate(shape)]
    return next((i for i in range(dimension, len(shape)) if slice_[i] % 2 == 0), None)


def _pass_around(x, axis, groups, dimension, dtype, step, part) -> Array:
    """Returns the sum of this device's slice, or of a half of it; `part` is the halved dimension and the half, or ().

    The sum of a slice begins at the next member of the ring.
    """
    count, place = len(groups[0]), _place_in_group(axis, groups)
    sizes, starts = list(x.shape), [0] * x.ndim
    length = sizes[dimension] = sizes[dimension] // count
    if part:
        halved, half = part
        sizes[halved] //= 2
        starts[halved] = half * sizes[halved]

    def own(offset: int) -> Array:
        first = (place + offset) % count * length + starts[dimension]
        slice_ = lax.dynamic_slice(x, [*starts[:dimension], first, *starts[dimension + 1 :]], sizes)
        return slice_.astype(jnp.float32)

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
