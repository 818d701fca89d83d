"""Creation of this shard's slices of parameters, and the kinds of parameters by their names."""

from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from shardformer.config.names import MATRICES, is_stacked

LORA_IN, LORA_OUT = "_lora_in", "_lora_out"  # the two factors of a matrix's adapter


def map_stacked(function: Callable, params: dict) -> dict:
    """Replaces each leaf of the layers by function(name, leaf)."""
    return {
        module: {name: function(name, leaf) if is_stacked(module) else leaf for name, leaf in leaves.items()}
        for module, leaves in params.items()
    }


def is_factor_of_product(name: str) -> bool:
    """Returns whether a parameter only multiplies activations: a matrix, an adapter's factor, an untied head."""
    return name.removesuffix(LORA_IN).removesuffix(LORA_OUT) in (*MATRICES, "w")


def weight(name: str, shape: Sequence[int], stddev: float) -> Array:
    """Returns a normal matrix. The caller derives `stddev` from global sizes: a local fan-in depends on the mesh."""

    def draw(shape, dtype):
        return stddev * jax.random.normal(hk.next_rng_key(), shape, dtype)

    return hk.get_parameter(name, shape, jnp.float32, init=draw)


def zeros(name: str, *shape: int) -> Array:
    """Returns a parameter that begins at zero."""
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.zeros)


def ones(name: str, *shape: int) -> Array:
    """Returns a parameter that begins at one."""
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.ones)


def add_bias(x: Array, bias: Array) -> Array:
    """Returns x[..., D] + bias[D] in x's dtype."""
    return add_broadcast(x, bias.reshape((1,) * (x.ndim - 1) + bias.shape))


def add_broadcast(x: Array, y: Array) -> Array:
    """Returns x + y in x's dtype, where `y` has size 1 on the axes that it is broadcast over.

    The sum is computed in float32, because the transpose of the broadcast adds up in the type of the sum: in bfloat16,
    the gradient of a bias was 42% off after 65,536 tokens.
    """
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
