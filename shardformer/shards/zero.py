"""ZeRO: parameters and gradients that are split over dp as well. Shard view.

Every device keeps a part of the parameters, of their gradients and of the optimizer's state. Stage 1 gathers all
parameters once, when a step begins, and scatters the gradients once, when it ends; stage 3 gathers each layer where it
is used, and scatters its gradient there. Without ZeRO every dimension is None, and the same functions send what plain
data parallelism does.
"""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config import Config
from shardformer.config.names import DP
from shardformer.shards.parameters import is_factor_of_product, is_stacked


class Zero:
    def __init__(self, config: Config, dimensions: dict, stages: tuple[int, ...] = ()):
        """`dimensions` holds the dimension of each parameter that is split over dp, or None.

        stages: factors of dp, the slowest first, over which a gradient is scattered one after the other. Over several
        dimensions of a torus at once, a TPU's compiler would sum whole gradients on every device.
        """
        self.config = config
        self._dimensions = dimensions
        self._stages = stages
        self._at_once = config.zero == 1

    def by_layer(self) -> "Zero":
        """The same arrays, each layer gathered where it is used, also with zero=1: for single forward passes."""
        other = copy.copy(self)
        other._at_once = False
        return other

    def make_local(self, params):
        """Parameters for the forward and backward passes, whose gradients stay on each shard until `mean`."""

        def make_local(name, p, dimension):
            if dimension is None:
                return lax.pcast(p, DP, to="varying")
            return self._gather(name, p, dimension) if self._at_once else p

        return self._map(make_local, params)

    def gather_once(self, params):
        """The parameters outside the layers, whole."""
        outside = {module: leaves for module, leaves in params.items() if not is_stacked(module)}
        return self._map(self._gather_where_used, outside)

    def gather_layer(self, stored):
        """One layer's parameters, without their leading L."""
        below = lambda dimension: None if dimension is None else dimension - 1
        return self._map(lambda name, p, dimension: self._gather_where_used(name, p, below(dimension)), stored)

    def mean(self, grads):
        """The mean over dp by one collective for each gradient; with ZeRO every device keeps only its part."""

        def mean(_, g, dimension):
            if dimension is None:
                return lax.pmean(g, DP)
            if self._at_once:
                return scatter_sum(g, dimension, self._stages) / self.config.dp
            return g / self.config.dp  # summed by the backward pass of its gathering

        return self._map(mean, grads)

    def _gather_where_used(self, name, p, dimension):
        return p if self._at_once or dimension is None else self._gather(name, p, dimension)

    def _gather(self, name, p, dimension):
        """In the type that the parameter multiplies in."""
        dtype = self.config.dtype if is_factor_of_product(name) else "float32"
        return _gather_over_dp(p.astype("float32"), dimension, dtype, self._stages)

    def _map(self, function, tree):
        """`function(name, leaf, dimension)` of a tree with some of the parameters' names."""
        return {
            module: {name: function(name, leaf, self._dimensions[module][name]) for name, leaf in leaves.items()}
            for module, leaves in tree.items()
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_over_dp(p, dimension, dtype, stages):
    """The whole parameter, sent in `dtype`; its gradient is summed in float32, as without ZeRO."""
    return lax.all_gather(p.astype(dtype), DP, axis=dimension, tiled=True)


def _forward(p, dimension, dtype, stages):
    return _gather_over_dp(p, dimension, dtype, stages), None


def _backward(dimension, dtype, stages, _, gradient):
    return (scatter_sum(gradient.astype(jnp.float32), dimension, stages),)


_gather_over_dp.defvjp(_forward, _backward)


def scatter_sum(x, dimension: int, stages: tuple[int, ...]):
    """The sum over dp, of which every device keeps its slice.

    The slowest factor of dp comes first, so that a device ends with the slice that a single stage would give it.
    """
    for groups in _groups_of_stages(stages):
        x = lax.psum_scatter(x, DP, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def _groups_of_stages(stages: tuple[int, ...]) -> list:
    """For each stage, the groups of dp indices that exchange: those that differ in this factor alone."""
    if len(stages) < 2:
        return [None]
    places = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(places, i, -1).reshape(-1, size).tolist() for i, size in enumerate(stages)]
