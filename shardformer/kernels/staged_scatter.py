"""A reduce-scatter in stages, one over each dimension of a torus. Shard view.

Over several dimensions of a torus at once, a TPU's compiler would all-reduce the full array.
"""

import math

import numpy as np
from jax import Array, lax

from shardformer.kernels import ring_scatter


def scatter_sum(
    x: Array, dimension: int, stages: tuple[int, ...], axes: str | tuple[str, ...], ring: str = ""
) -> Array:
    """Sums over mesh axes; every device keeps the slice of `dimension` that one reduce-scatter would give.

    `stages` are factors of the number of devices, the slowest first; () for one stage. `ring` is the number type in
    which rings send; without one, XLA reduce-scatters. Rings take the longest stage first, but for slices of columns,
    the last dimension: a TPU would copy these.
    """
    stages = stages or (lax.axis_size(axes),)
    groups = _groups_of_stages(stages)
    order = _order_stages(stages) if ring and dimension < x.ndim - 1 else list(range(len(stages)))
    if order == list(range(len(stages))):
        for group in groups:
            x = _scatter_stage(x, dimension, group, axes, ring)
        return x
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    x = x.reshape(*before, *stages, -1, *after)
    for stage in order:
        x = _scatter_stage(x, dimension + stage, groups[stage], axes, ring)
    return x.reshape(*before, -1, *after)


def _order_stages(stages: tuple[int, ...]) -> list[int]:
    """Returns the longest stage first: its ring has links both ways, and the later stages have less to send."""
    return sorted(range(len(stages)), key=lambda stage: -stages[stage])


def _scatter_stage(x, dimension, groups, axes, ring):
    if ring and x.ndim > 1 and 1 < len(groups[0]) <= ring_scatter.MOST:
        return ring_scatter.ring_scatter(x, axes, groups, dimension, ring)
    within = groups if len(groups) > 1 else None
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, axis_index_groups=within, tiled=True)


def _groups_of_stages(stages: tuple[int, ...]) -> list:
    """Returns, for each stage, the groups of device indices that exchange; they differ only in this factor."""
    indices = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(indices, i, -1).reshape(-1, size).tolist() for i, size in enumerate(stages)]
