"""A reduce-scatter over the dimensions of a torus: one exchange, or one stage for each dimension. Shard view.

Over several dimensions of a torus at once, a TPU's compiler would all-reduce the full array.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.kernels.exchange_scatter import exchange_scatter
from shardformer.kernels.fused_attention import Hardware
from shardformer.kernels.gradient_pieces import split_columns

# Members of a dimension up to which the parts of an exchange take the links hardly longer than partial sums in stages
# do. A part crosses a quarter of its dimension on average.
EXCHANGED = 4


class Scattering(NamedTuple):
    """The way in which gradients are summed over dp."""

    stages: tuple[int, ...] = ()  # factors of the number of devices, the slowest first; () for one stage
    exchange: bool = False  # a TPU runs it beside products, and waits for the reduce-scatters of stages
    in_pieces: bool = False  # wide gradients, in those in which `linear` computes them on a TPU


IN_ONE_STAGE = Scattering()


def choose_scattering(stages: tuple[int, ...], hardware: Hardware, devices: int) -> Scattering:
    """Returns the way for a slice of so many devices, in which dp follows dimensions of these sizes."""
    is_tpu, is_short = hardware.platform == "tpu", 0 < max(stages, default=0) <= EXCHANGED
    can_exchange = is_tpu and devices <= (hardware.exchanging or devices)
    return Scattering(stages, is_short and can_exchange, in_pieces=is_tpu)


def scatter_sum(
    x: Array, dimension: int, way: Scattering, axes: str | tuple[str, ...], sent_as: str = "float32"
) -> Array:
    """Sums over mesh axes; every device keeps the float32 slice of `dimension` that one reduce-scatter would give.

    `sent_as` is the number type in which devices send. Vectors are sent in float32, and slices of columns, the last
    dimension, in stages: a TPU would copy them for an exchange.
    """
    is_matrix_of_rows = x.ndim > 1 and dimension < x.ndim - 1
    pieces = split_columns(x, x.size) if way.in_pieces and is_matrix_of_rows else [x]
    if way.exchange and is_matrix_of_rows:
        sums = [exchange_scatter(piece, axes, dimension, sent_as) for piece in pieces]
    else:
        sums = [_scatter_in_stages(piece, dimension, way.stages, axes, sent_as) for piece in pieces]
    return lax.concatenate(sums, x.ndim - 1)


def _scatter_in_stages(x, dimension, stages, axes, sent_as):
    stages = stages or (lax.axis_size(axes),)
    for group in find_groups(stages):
        within = group if len(stages) > 1 else None
        x = x if x.ndim == 1 else x.astype(sent_as)
        x = lax.psum_scatter(x, axes, scatter_dimension=dimension, axis_index_groups=within, tiled=True)
    return x.astype(jnp.float32)


def find_groups(stages: tuple[int, ...]) -> list[list[list[int]]]:
    """Returns, for each stage, the groups of device indices that exchange; they differ only in this factor."""
    indices = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(indices, i, -1).reshape(-1, size).tolist() for i, size in enumerate(stages)]
