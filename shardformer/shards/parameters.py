"""Creation of this shard's slices of parameters, and operations on them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from shardformer.config import Config
from shardformer.config.names import DP, MP, is_stacked
from shardformer.kernels.linear import linear


def map_stacked(function: Callable, params: dict) -> dict:
    """Replaces each leaf of the layers by function(name, leaf)."""
    return {
        module: {name: function(name, leaf) if is_stacked(module) else leaf for name, leaf in leaves.items()}
        for module, leaves in params.items()
    }


def weight(name: str, shape: Sequence[int], stddev: float) -> Array:
    """Returns a normal matrix. The caller derives `stddev` from global sizes: a local fan-in depends on the mesh."""

    def draw(shape, dtype):
        return stddev * jax.random.normal(hk.next_rng_key(), shape, dtype)

    return hk.get_parameter(name, shape, jnp.float32, init=draw)


def zeros(name: str, *shape: int) -> Array:
    """Returns a parameter that starts at zero."""
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.zeros)


def ones(name: str, *shape: int) -> Array:
    """Returns a parameter that starts at one."""
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.ones)


def project(x_BTI: Array, outputs: int, config: Config) -> Array:
    """Returns the product of activations and the matrix `project`, which is on every shard of the model."""
    inputs = x_BTI.shape[-1]
    w_IO = weight("project", [inputs, outputs], config.model.matrix_std or 1 / math.sqrt(inputs))
    return linear(x_BTI, w_IO.astype(x_BTI.dtype))


def draw_only(module_call: Callable, key: Array) -> dict:
    """Returns the parameters of a module's call on axes of size 1; drops other operations, which are slow to map."""
    initialise: Any = hk.transform(module_call).init
    traced, shapes = jax.make_jaxpr(initialise, axis_env=[(DP, 1), (MP, 1)], return_shape=True)(key)
    draws = jaxpr_as_fun(ClosedJaxpr(_drop_unused(traced.jaxpr), traced.consts))
    return jax.tree.unflatten(jax.tree.structure(shapes), draws(key))


def _drop_unused(program: Jaxpr) -> Jaxpr:
    """Returns a program without the operations that its results do not need."""
    needed, kept = set(_variables(program.outvars)), []
    for operation in reversed(program.eqns):
        if needed.intersection(operation.outvars):
            kept.append(operation)
            needed.update(_variables(operation.invars))
    return program.replace(eqns=kept[::-1])


def _variables(operands) -> list[Var]:
    return [operand for operand in operands if isinstance(operand, Var)]  # and no literal


def add_bias(x: Array, bias: Array) -> Array:
    """Returns x[..., D] + bias[D] in x's dtype."""
    return add_broadcast(x, bias.reshape((1,) * (x.ndim - 1) + bias.shape))


def add_broadcast(x: Array, y: Array) -> Array:
    """Returns x + y in x's dtype, where `y` has size 1 on the axes that it is broadcast over.

    The sum is computed in float32, because the transpose of the broadcast adds up in the type of the sum: in bfloat16,
    the gradient of a bias was 42% off after 65,536 tokens.
    """
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


def unstack(tree, count: int) -> list:
    """Splits the leading axis of each leaf; a leaf may be a list already. Returns a list of trees.

    lax.split joins the gradients by one concatenation.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_list)
    columns = [x if _is_list(x) else [part[0] for part in lax.split(x, (1,) * count)] for x in leaves]
    return [jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)]


def _is_list(leaf) -> bool:
    return isinstance(leaf, list)
