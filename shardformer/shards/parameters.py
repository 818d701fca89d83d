"""Creates this shard's slice of a parameter, and says by its name what a parameter is."""

import haiku as hk
import jax
import jax.numpy as jnp

from shardformer.config.names import LAYERS, MATRICES

LORA_IN, LORA_OUT = "_lora_in", "_lora_out"  # the two factors of a matrix's adapter


def is_stacked(module: str) -> bool:
    """Whether the module's parameters are those of all layers, stacked on a leading L."""
    return module.startswith(LAYERS)


def map_stacked(function, params):
    """The tree with function(name, leaf) in place of the layers' leaves."""
    return {
        module: {name: function(name, leaf) if is_stacked(module) else leaf for name, leaf in leaves.items()}
        for module, leaves in params.items()
    }


def is_factor_of_product(name: str) -> bool:
    """Whether a parameter only multiplies activations: a matrix, a factor of its adapter, an untied head."""
    return name.removesuffix(LORA_IN).removesuffix(LORA_OUT) in (*MATRICES, "w")


def weight(name: str, shape, stddev: float):
    """A normal matrix. The caller derives `stddev` from global sizes, as a local fan-in would depend on the mesh."""
    return hk.get_parameter(name, shape, jnp.float32, init=_Normal(stddev))


def zeros(name: str, *shape: int):
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.zeros)


def ones(name: str, *shape: int):
    return hk.get_parameter(name, shape, jnp.float32, init=jnp.ones)


def add_bias(x, bias):
    """Returns x[..., D] + bias[D] in x's dtype."""
    return add_broadcast(x, bias.reshape((1,) * (x.ndim - 1) + bias.shape))


def add_broadcast(x, y):
    """Returns x + y in x's dtype, where `y` has size 1 on the axes that it is broadcast over.

    The sum is computed in float32, because the transpose of the broadcast adds up in the type of the sum: in bfloat16,
    the gradient of a bias was 42% off after 65,536 tokens.
    """
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


class _Normal(hk.initializers.Initializer):
    def __init__(self, stddev: float):
        self.stddev = stddev

    def __call__(self, shape, dtype):
        return self.stddev * jax.random.normal(hk.next_rng_key(), shape, dtype)
