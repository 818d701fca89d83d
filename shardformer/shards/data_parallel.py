"""Parameters and gradients over dp: replicated (plain data parallelism), or split as well (ZeRO). Shard view.

If the context is split over cp, the parameters are replicas along cp too: dp then means dp x cp everywhere below.

With ZeRO, every device keeps a part of the parameters, of their gradients and of the optimizer's state. Stage 1
gathers all parameters when a step begins and scatters the gradients when it ends. Stage 3 gathers each layer where it
is used, and scatters its gradient there.
"""

import copy
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.config import Config
from shardformer.config.names import CP, DP
from shardformer.kernels import ring_scatter
from shardformer.shards.parameters import is_factor_of_product, is_stacked


class DataParallel:
    """The collectives over dp for one layout of the parameters."""

    def __init__(self, config: Config, dimensions: dict, stages: tuple[int, ...] = (), ring: str = ""):
        """Takes the dimension of each parameter that is split over dp, or None if it is replicated.

        `stages` are factors of dp, the slowest first. A gradient is scattered over one factor after the other: over
        several dimensions of a torus at once, a TPU's compiler would all-reduce the full gradient. `ring` is the number
        type in which rings send the layers' gradients of zero=3; without one, XLA reduce-scatters them.
        """
        self.config = config
        self._dimensions = dimensions
        self._stages, self._ring = stages, ring
        self._axes = (DP, CP) if config.cp > 1 else DP
        self._at_once = config.zero == 1

    def by_layer(self) -> "DataParallel":
        """Returns the same layout, gathered layer by layer even if zero=1: for single forward passes."""
        other = copy.copy(self)
        other._at_once = False
        return other

    def make_local(self, params: dict) -> dict:
        """Returns the parameters of a forward and backward pass; their gradients stay on each shard until `mean`."""

        def make_local(name, p, dimension):
            if dimension is None:
                return lax.pcast(p, self._axes, to="varying")
            return self._gather(name, p, dimension) if self._at_once else p

        return self._map(make_local, params)

    def gather_once(self, params: dict) -> dict:
        """Returns the parameters outside the layers, unsharded over dp."""
        outside = {module: leaves for module, leaves in params.items() if not is_stacked(module)}
        return self._map(self._gather_where_used, outside)

    def gather_layer(self, stored: dict) -> dict:
        """Returns one layer's parameters, unsharded over dp, from stored ones without their leading L."""

        def gather(name, p, dimension):
            return self._gather_where_used(name, p, None if dimension is None else dimension - 1, self._ring)

        return self._map(gather, stored)

    def mean(self, grads: dict) -> dict:
        """Averages over dp with one collective for each gradient; with ZeRO, every device keeps only its part."""

        def mean(_, g, dimension):
            if dimension is None:
                return lax.pmean(g, self._axes)
            if self._at_once:
                return scatter_sum(g, dimension, self._stages, self._axes) / self.config.replicas
            return g / self.config.replicas  # the backward pass of its gathering has summed it

        return self._map(mean, grads)

    def _gather_where_used(self, name, p, dimension, ring=""):
        return p if self._at_once or dimension is None else self._gather(name, p, dimension, ring)

    def _gather(self, name, p, dimension, ring=""):
        """Gathers in the matmul dtype; parameters that are not factors of products in float32."""
        dtype = self.config.dtype if is_factor_of_product(name) else "float32"
        return _gather_over_dp(p.astype("float32"), dimension, dtype, self._stages, self._axes, ring)

    def _map(self, function: Callable, tree: dict) -> dict:
        """Maps `function(name, leaf, dimension)` over a tree that has some of the parameters' names."""
        return {
            module: {name: function(name, leaf, self._dimensions[module][name]) for name, leaf in leaves.items()}
            for module, leaves in tree.items()
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather_over_dp(p, dimension, dtype, stages, axes, ring):
    """Gathers a parameter in `dtype`; its gradient is summed in float32, as without ZeRO."""
    return lax.all_gather(p.astype(dtype), axes, axis=dimension, tiled=True)


def _forward(p, dimension, dtype, stages, axes, ring):
    return _gather_over_dp(p, dimension, dtype, stages, axes, ring), None


def _backward(dimension, dtype, stages, axes, ring, _, gradient):
    return (scatter_sum(gradient.astype(jnp.float32), dimension, stages, axes, ring),)


_gather_over_dp.defvjp(_forward, _backward)


def scatter_sum(
    x: Array, dimension: int, stages: tuple[int, ...], axes: str | tuple[str, ...] = DP, ring: str = ""
) -> Array:
    """Sums over dp; every device keeps its slice of `dimension`.

    The slowest factor of dp comes first, so that each device ends with the slice that one reduce-scatter would give.
    """
    for groups in _groups_of_stages(stages or (lax.axis_size(axes),)):
        if ring and x.ndim > 1 and 1 < len(groups[0]) <= ring_scatter.MOST:
            x = ring_scatter.ring_scatter(x, axes, groups, dimension, ring)
        else:
            within = groups if len(groups) > 1 else None
            x = lax.psum_scatter(x, axes, scatter_dimension=dimension, axis_index_groups=within, tiled=True)
    return x


def _groups_of_stages(stages: tuple[int, ...]) -> list:
    """Returns, for each stage, the groups of dp indices that exchange: indices that differ only in this factor."""
    indices = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(indices, i, -1).reshape(-1, size).tolist() for i, size in enumerate(stages)]
