"""ZeRO: parameters and gradients that are split over dp as well. Shard view.

Stage 1 splits the gradients, and with them the optimizer's state; stage 3 the parameters as well, which are then
gathered where they are used. Without ZeRO every dimension is None, and the same functions send what plain data
parallelism does.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.shards.parameters import is_factor_of_product, is_stacked

DP = "dp"


class Zero:
    def __init__(self, config: Config, dimensions: dict, same_on_every_dp: bool = False):
        """`dimensions` names for each parameter the one that is split over dp, or None.

        same_on_every_dp: every dp computes the same, as in sampling, and the results must be known to be equal.
        """
        self.config = config
        self._dimensions = dimensions
        self._to = "invarying" if same_on_every_dp else "varying"

    def same_on_every_dp(self) -> "Zero":
        return Zero(self.config, self._dimensions, same_on_every_dp=True)

    def make_local(self, params):
        """Parameters whose gradients stay on each shard through every loop, until `mean` ends them."""
        keep = lambda p, dimension: p if self._is_split(dimension) else lax.pcast(p, DP, to="varying")
        return self._map(keep, params)

    def gather_once(self, params):
        """What is used once, whole: the parameters outside the layers."""
        outside = {module: leaves for module, leaves in params.items() if not is_stacked(module)}
        return self._map(self._gather, outside)

    def gather_layer(self, stored):
        """One layer's parameters, without their leading L; products travel in the type that they multiply in."""
        gather = lambda name, p, d: self._gather(p, None if d is None else d - 1, self._type_on_wire(name))
        return {
            module: {name: gather(name, p, self._dimensions[module][name]) for name, p in leaves.items()}
            for module, leaves in stored.items()
        }

    def mean(self, grads):
        """The mean over dp by one collective for each gradient; with ZeRO every device keeps its part alone."""

        def mean(g, dimension):
            if self._is_split(dimension):
                return g / self.config.dp  # summed by the backward pass of its gathering
            if dimension is None:
                return lax.pmean(g, DP)
            return lax.psum_scatter(g, DP, scatter_dimension=dimension, tiled=True) / self.config.dp

        return self._map(mean, grads)

    def _gather(self, p, dimension, dtype="float32"):
        return _gather_over_dp(p.astype("float32"), dimension, dtype, self._to) if self._is_split(dimension) else p

    def _type_on_wire(self, name: str) -> str:
        return self.config.dtype if is_factor_of_product(name) else "float32"

    def _is_split(self, dimension) -> bool:
        """Whether the parameter itself is split over dp, not only its gradient."""
        return self.config.zero == 3 and dimension is not None

    def _map(self, function, tree):
        """`function(leaf, dimension)` of a tree with some of the parameters' names."""
        return {
            module: {name: function(leaf, self._dimensions[module][name]) for name, leaf in leaves.items()}
            for module, leaves in tree.items()
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_over_dp(p, dimension, dtype, to):
    """Whole on every dp, sent in this type; its gradient is summed in the parameter's own, as without ZeRO."""
    return lax.all_gather(p.astype(dtype), DP, axis=dimension, tiled=True, to=to)


def _forward(p, dimension, dtype, to):
    return _gather_over_dp(p, dimension, dtype, to), None


def _backward(dimension, dtype, to, _, gradient):
    return (lax.psum_scatter(gradient.astype(jnp.float32), DP, scatter_dimension=dimension, tiled=True),)


_gather_over_dp.defvjp(_forward, _backward)
