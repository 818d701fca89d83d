"""Parameters and gradients over the replicas of data parallelism: replicated, ZeRO-1 or ZeRO-3. Shard view.

The rows of a batch are split over dp and over the stages of a pipeline: each stage embeds its rows and computes
their loss. With context parallelism, the parameters are replicated over cp too, and ZeRO splits them over dp x cp.

With ZeRO, every device stores a part of the parameters, of their gradients and of the optimizer's state (so does ZeRO-1
here, unlike in the paper). ZeRO-1 gathers all parameters when a step starts and reduce-scatters the gradients when it
ends. ZeRO-3 gathers each layer where it is used; the backward pass of that gather reduce-scatters the layer's gradient.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config.names import DP, is_factor_of_product, is_stacked
from shardformer.parallel.scattering import IN_ONE_STAGE, Scattering, gather_parts, scatter_sum


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Plain data parallelism: every replica stores all parameters, and an all-reduce averages the gradients."""

    # The mesh axes of the replicas of a layer's parameters, of sizes above 1; ZeRO splits all parameters over these.
    layer_axes: tuple[str, ...] = ()
    outside_axes: tuple[str, ...] = ()  # the same for parameters outside the layers: every pipeline stage has them
    count: int = 1  # shards of a batch's tokens
    # Prefixes of layer parameters that are split over dp and never gathered, as experts are: each shard of dp computes
    # with its part.
    shared_by_dp: tuple[str, ...] = ()

    def with_dimensions(self, dimensions: dict) -> "Replicated":
        """Returns the replicas of parameters that ZeRO splits along these dimensions, {module: {name: dimension}}."""
        return self

    def for_forward_pass(self) -> "Replicated":
        """Returns the same replicas for forward passes without gradients."""
        return self

    def make_local(self, params: dict) -> dict:
        """Returns the parameters that a forward and backward pass uses.

        Replicated ones are marked as varying over their replicas, so that their gradients are not summed before `mean`.
        """
        return map_named(lambda name, p: collectives.vary(p, self.axes_of(name)), params)

    def gather_outside(self, params: dict) -> dict:
        """Returns the parameters outside the layers, complete on every replica."""
        return {module: leaves for module, leaves in params.items() if not is_stacked(module)}

    def gather_layer(self, stored: dict) -> dict:
        """Returns one layer's parameters, complete on every replica, from stored ones without their leading L."""
        return stored

    def mean(self, grads: dict) -> dict:
        """Averages gradients over the batch's tokens: all-reduces those of replicated parameters, then divides."""
        return map_named(lambda name, g: collectives.psum(g, self.axes_of(name)) / self.count, grads)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of a parameter's replicas; a stage's layers see the rows of all stages."""
        if self.shared_by_dp and name.rpartition("/")[2].startswith(self.shared_by_dp):
            return tuple(axis for axis in self.layer_axes if axis != DP)
        return self.layer_axes if is_stacked(name) else self.outside_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def gather_and_scatter(p, dimension, dtype, scattering, axes, grad_dtype):
    """Gathers a parameter in `dtype`. Its gradient is cast to float32, sent in `grad_dtype`, and scattered."""
    return gather_parts(p.astype(dtype), dimension, scattering.stages, axes)


def _gather_forward(p, dimension, dtype, scattering, axes, grad_dtype):
    return gather_and_scatter(p, dimension, dtype, scattering, axes, grad_dtype), None


def _scatter_gradient(dimension, dtype, scattering, axes, grad_dtype, _, gradient):
    return (scatter_sum(gradient.astype(jnp.float32), dimension, scattering, axes, grad_dtype),)


gather_and_scatter.defvjp(_gather_forward, _scatter_gradient)


@dataclasses.dataclass(frozen=True)
class Zero(Replicated):
    """The functions that ZeRO-1 and ZeRO-3 share. A parameter without a dimension that divides stays replicated."""

    dtype: str = "float32"  # in which matrices are gathered; other parameters are gathered in float32
    grad_dtype: str = "float32"  # in which ZeRO-3 sends gradients of matrices; those of vectors are sent in float32
    scattering: Scattering = IN_ONE_STAGE  # of one layer's gradients
    dimensions: dict = dataclasses.field(default_factory=dict, compare=False)  # {module: {name: dimension or None}}

    def with_dimensions(self, dimensions: dict) -> "Zero":
        return dataclasses.replace(self, dimensions=dimensions)

    def for_forward_pass(self) -> "ForwardZero":
        return ForwardZero(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes over which a parameter stays replicated."""
        axes = super().axes_of(name)
        return axes if self.dimension(name) is None else tuple(axis for axis in axes if axis not in self.layer_axes)

    def dimension(self, name: str) -> int | None:
        """Returns the dimension along which a parameter of this full name is split, or None."""
        module, _, leaf = name.rpartition("/")
        return self.dimensions[module][leaf]

    def gather(self, name: str, p: Array, dimension: int | None, scattering: Scattering) -> Array:
        """Returns a parameter of which every replica has a part along `dimension`.

        Factors of products are returned in the matmul dtype. The cast to float32 comes before the gather, so that the
        sum of the gradient is float32 and is rounded once, if the parameter is bfloat16.
        """
        if dimension is None:
            return p
        dtype = self.dtype if is_factor_of_product(name.rpartition("/")[2]) else "float32"
        return gather_and_scatter(p.astype("float32"), dimension, dtype, scattering, self.layer_axes, self.grad_dtype)

    @property
    def without_exchange(self) -> Scattering:
        """The scattering of gradients of many layers or a large table: an all-to-all would need too large buffers."""
        return Scattering(self.scattering.stages)


class Zero1(Zero):
    """ZeRO-1: one gather of all parameters when a step starts, one reduce-scatter of the gradients when it ends."""

    def make_local(self, params: dict) -> dict:
        def gather(name, p):
            return self.gather(name, p, self.dimension(name), self.without_exchange)

        return super().make_local(map_named(gather, params))

    def mean(self, grads: dict) -> dict:
        def scatter(name, g):
            dimension = self.dimension(name)
            return g if dimension is None else scatter_sum(g, dimension, self.without_exchange, self.layer_axes)

        return super().mean(map_named(scatter, grads))


class Zero3(Zero):
    """ZeRO-3: a gather of each layer where it is used, whose backward pass reduce-scatters the layer's gradient.

    So `make_local` sends nothing, and `mean` only divides gradients of split parameters: the backward pass summed them.
    """

    def gather_outside(self, params: dict) -> dict:
        def gather(name, p):
            return self.gather(name, p, self.dimension(name), self.without_exchange)

        return map_named(gather, super().gather_outside(params))

    def gather_layer(self, stored: dict) -> dict:
        def gather(name, p):
            dimension = self.dimension(name)
            return self.gather(name, p, None if dimension is None else dimension - 1, self.scattering)

        return map_named(gather, stored)


class ForwardZero(Zero3):
    """ZeRO in forward passes without gradients: both ZeRO-1 and ZeRO-3 gather layer by layer.

    The parameters are marked as the same on every shard, so that logits of a split context can be.
    """

    def gather(self, name: str, p: Array, dimension: int | None, scattering: Scattering) -> Array:
        if dimension is None:
            return p
        dtype = self.dtype if is_factor_of_product(name.rpartition("/")[2]) else "float32"
        # A gather within groups gives a value that JAX cannot know to be the same on all devices.
        part = p.astype("float32").astype(dtype)
        return lax.all_gather(part, self.layer_axes, axis=dimension, tiled=True, to="invarying")


def map_named(function: Callable, tree: dict) -> dict:
    """Maps `function(full name, leaf)` over a tree {module: {name: leaf}}."""
    return {
        module: {name: function(f"{module}/{name}", leaf) for name, leaf in leaves.items()}
        for module, leaves in tree.items()
    }
