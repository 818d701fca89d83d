"""ZeRO's reduce-scatters and all-gathers over the dimensions of a torus. Shard view.

Over two or more dimensions of a torus at once, a TPU's compiler would all-reduce the full array. So a gradient is
reduce-scattered in stages, one for each dimension, or by one exchange: an all-to-all of parts, which every device adds
up. A wide gradient is sent in the pieces in which `linear` computes it.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.collectives import Axes
from shardformer.kernels.linear import split_columns

GATHERED_AT_ONCE = 32  # devices; libtpu 0.0.52 gathers over three dimensions at once on v4:2x4x4, not on v4:4x4x4
# Largest full array that libtpu all-reduces instead of gathering it over two torus dimensions. On v5e:8x8 it does so
# with 17 MB, and not with 34 MB.
ALL_REDUCED_BYTES = 1 << 25


class Scattering(NamedTuple):
    """The method by which gradients are summed over the replicas."""

    stages: tuple[int, ...] = ()  # torus dimensions that the devices follow, the slowest first; () is like (devices,)
    exchange: bool = False  # a TPU runs it next to products, and waits for the reduce-scatters of stages
    in_pieces: bool = False  # wide gradients, in those in which `linear` computes them on a TPU


IN_ONE_STAGE = Scattering()


def scatter_sum(x: Array, dimension: int, scattering: Scattering, axes: Axes, sent_as: str = "float32") -> Array:
    """Sums over mesh axes; every device keeps the float32 slice of `dimension` that one reduce-scatter would give.

    `sent_as` is the number type in which devices send. Vectors are sent in float32, and slices of columns, the last
    dimension, in stages: a TPU would copy them for an exchange.
    """
    is_matrix_of_rows = x.ndim > 1 and dimension < x.ndim - 1
    # A kernel computes the gradients of all experts at once: pieces would wait for each other behind it.
    in_pieces = scattering.in_pieces and is_matrix_of_rows and x.ndim == 2
    pieces = split_columns(x, x.size) if in_pieces else [x]
    if scattering.exchange and is_matrix_of_rows:
        sums = [exchange_scatter(piece, axes, dimension, sent_as) for piece in pieces]
    else:
        sums = [_scatter_in_stages(piece, dimension, scattering.stages, axes, sent_as) for piece in pieces]
    return lax.concatenate(sums, x.ndim - 1)


def exchange_scatter(x: Array, axes: Axes, dimension: int, dtype: str) -> Array:
    """Sums x over `axes` by an all-to-all of parts; every device adds up and keeps its float32 slice of `dimension`.

    The TPU's compiler has no asynchronous reduce-scatter: the products wait for the wire. Its all-to-all is
    asynchronous (devices/chips.py). In a ring of sends, which are asynchronous too, each partial sum is
    written and reread, twice as many bytes in total.

    x is rounded to `dtype` before it is sent. The additions are float32, in the order of the devices.
    """
    count = lax.axis_size(axes)
    received = lax.all_to_all(x.astype(dtype), axes, dimension, dimension, tiled=True)
    # Not `sum`: a TPU's reduction over the parts takes 3.5 times as long.
    first, *rest = lax.split(received, (x.shape[dimension] // count,) * count, dimension)
    total = first.astype(jnp.float32)
    for part in rest:
        total = total + part.astype(jnp.float32)
    return total


def _scatter_in_stages(x: Array, dimension: int, stages: tuple[int, ...], axes: Axes, sent_as: str) -> Array:
    stages = stages or (lax.axis_size(axes),)
    for group in find_groups(stages):
        within = group if len(stages) > 1 else None
        x = x if x.ndim == 1 else x.astype(sent_as)
        x = lax.psum_scatter(x, axes, scatter_dimension=dimension, axis_index_groups=within, tiled=True)
    return x.astype(jnp.float32)


def gather_parts(
    x: Array,
    dimension: int,
    stages: tuple[int, ...],
    axes: Axes,
    at_once: int = GATHERED_AT_ONCE,
    all_reduced: int = ALL_REDUCED_BYTES,
) -> Array:
    """Returns the parts of all devices, joined along `dimension` in the order of one all-gather.

    `stages` are factors of the number of devices, the slowest first; () for one stage. Over 64 chips in three
    dimensions at once, a TPU's compiler would all-reduce full arrays that are zero outside of each device's part: twice
    the bytes, for which products wait. On v4:4x4x4, stages expose 12 ms of gptj_6b, not 163. Over two dimensions it
    does so with small arrays. Larger ones are gathered at once, over the links of both dimensions.
    """
    devices = math.prod(stages)
    is_large = x.size * x.dtype.itemsize * devices > all_reduced
    if len(stages) < 2 or devices <= at_once or (len(stages) == 2 and is_large):
        return lax.all_gather(x, axes, axis=dimension, tiled=True)
    # Of three or more, the two slowest come last and together: most bytes cross then, over the links of both.
    together = stages if len(stages) == 2 else (stages[0] * stages[1], *stages[2:])
    for groups in reversed(find_groups(together)):
        x = lax.all_gather(x, axes, axis=dimension, tiled=True, axis_index_groups=groups)
    return x


def find_groups(stages: tuple[int, ...]) -> list[list[list[int]]]:
    """Returns, for each stage, the groups of device indices that exchange; they differ only in this factor."""
    indices = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(indices, i, -1).reshape(-1, size).tolist() for i, size in enumerate(stages)]
