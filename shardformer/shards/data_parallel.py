"""Parameters and gradients over dp: replicated (plain data parallelism), or split as well (ZeRO). Shard view.

The rows of a batch are split over dp and over the stages of a pipeline: each stage embeds its own rows and computes
their loss. If the context is split over cp, the parameters are replicas along cp too: dp then means dp x cp everywhere
below.

With ZeRO, every device keeps a part of the parameters, of their gradients and of the optimizer's state. Stage 1
gathers all parameters when a step begins and scatters the gradients when it ends. Stage 3 gathers each layer where it
is used, and scatters its gradient there.
"""

import copy
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.config.names import CP, DP, PP, is_stacked
from shardformer.kernels import named_axes
from shardformer.kernels.staged_gather import gather_parts
from shardformer.kernels.staged_scatter import IN_ONE_STAGE, Scattering, scatter_sum
from shardformer.shards.parameters import is_factor_of_product


class DataParallel:
    """The collectives over dp for one layout of the parameters."""

    def __init__(self, config: Config, dimensions: dict, way: Scattering = IN_ONE_STAGE):
        """Takes the dimension of each parameter that is split over dp, or None if it is replicated.

        `way` is how the gradients of layers are scattered, by default in one stage. Larger ones, and those of all
        layers at once, are not exchanged: a device would keep what it sends and what it receives.
        """
        self.config = config
        self._dimensions = dimensions
        self.scatter_in(way)
        self._axes = tuple(axis for axis, size in ((DP, config.dp), (CP, config.cp)) if size > 1)
        self._at_once = config.zero == 1
        self._to = "varying"

    def by_layer(self) -> "DataParallel":
        """Returns the same layout for single forward passes: gathered layer by layer even if zero=1.

        The parameters are marked as the same on every shard, so that logits of a split context can be.
        """
        other = copy.copy(self)
        other._at_once, other._to = False, "invarying"
        return other

    def scatter_in(self, way: Scattering) -> None:
        """Scatters from now on as other devices would: for a trace, which has none."""
        self._way, self._in_stages = way, Scattering(way.stages)

    def make_local(self, params: dict) -> dict:
        """Returns the parameters of a forward and backward pass; their gradients stay on each shard until `mean`."""

        def make_local(name, p, dimension):
            if dimension is None:
                return named_axes.vary(p, self._axes + self._stage_axes(name))
            p = self._gather(name, p, dimension, self._in_stages) if self._at_once else p
            return named_axes.vary(p, self._stage_axes(name))

        return self._map(make_local, params)

    def gather_once(self, params: dict) -> dict:
        """Returns the parameters outside the layers, unsharded over dp."""
        outside = {module: leaves for module, leaves in params.items() if not is_stacked(module)}
        return self._map(functools.partial(self._gather_where_used, way=self._in_stages), outside)

    def gather_layer(self, stored: dict) -> dict:
        """Returns one layer's parameters, unsharded over dp, from stored ones without their leading L."""

        def gather(name, p, dimension):
            return self._gather_where_used(name, p, None if dimension is None else dimension - 1, self._way)

        return self._map(gather, stored)

    def mean(self, grads: dict) -> dict:
        """Averages over the tokens by one collective for each gradient; with ZeRO, every device keeps only its part."""

        def mean(name, g, dimension):
            axes = self._stage_axes(name)
            if dimension is None:
                axes = self._axes + axes
            elif self._at_once:  # else the backward pass of its gathering has summed it
                g = scatter_sum(g, dimension, self._in_stages, self._axes)
            return named_axes.psum(g, axes) / (self.config.replicas * self.config.pp)

        return self._map(mean, grads)

    def _stage_axes(self, name: str) -> tuple[str, ...]:
        """Returns the axis of stages for a parameter that all have; a stage's own layers see the rows of all."""
        return () if self.config.pp == 1 or is_stacked(name) else (PP,)

    def _gather_where_used(self, name, p, dimension, way):
        return p if self._at_once or dimension is None else self._gather(name, p, dimension, way)

    def _gather(self, name, p, dimension, way):
        """Gathers in the matmul dtype; parameters that are not factors of products in float32."""
        dtype = self.config.dtype if is_factor_of_product(name.rpartition("/")[2]) else "float32"
        over = way, self._axes, self.config.grad_dtype, self._to
        return _gather_over_dp(p.astype("float32"), dimension, dtype, *over)

    def _map(self, function: Callable, tree: dict) -> dict:
        """Maps `function(full name, leaf, dimension)` over a tree that has some of the parameters' names."""

        def apply(module, name, leaf):
            return function(f"{module}/{name}", leaf, self._dimensions[module][name])

        return {module: {name: apply(module, name, p) for name, p in leaves.items()} for module, leaves in tree.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5, 6))
def _gather_over_dp(p, dimension, dtype, way, axes, sent_as, to):
    """Gathers a parameter in `dtype`; its gradient is summed in float32, as without ZeRO."""
    if to == "varying":
        return gather_parts(p.astype(dtype), dimension, way.stages, axes)
    # A gather within groups gives a value that JAX cannot know to be the same on all devices.
    return lax.all_gather(p.astype(dtype), axes, axis=dimension, tiled=True, to=to)


def _forward(p, dimension, dtype, way, axes, sent_as, to):
    return _gather_over_dp(p, dimension, dtype, way, axes, sent_as, to), None


def _backward(dimension, dtype, way, axes, sent_as, to, _, gradient):
    return (scatter_sum(gradient.astype(jnp.float32), dimension, way, axes, sent_as),)


_gather_over_dp.defvjp(_forward, _backward)
