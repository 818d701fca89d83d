"""The activations of the feed-forward, the values of `activation=`: functions of x, or of x and its gate."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from shardformer.config.registries import Registry

ACTIVATIONS = Registry("kernels/activations.py")
SCALE, CUBE = math.sqrt(8 / math.pi), 0.044715
STEEPNESS, LIMIT = 1.702, 7.0  # of gpt-oss


@ACTIVATIONS.register
@jax.custom_jvp
def gelu(x: Array) -> Array:
    """Returns GELU in its tanh form, written as x / (1 + exp(-2z)): the same function with the division last.

    XLA recomputes a cheap last operation inside every consumer, among them the transposing copies of the backward
    pass. tanh's form ends in a product, which is cheap; a division is computed once.
    """
    return x / (1 + _exp_minus_2z(x))


@gelu.defjvp
def _jvp(primals, tangents):
    """Differentiates by hand: automatic differentiation would divide infinity by infinity if exp overflows."""
    (x,), (dx,) = primals, tangents
    e = _exp_minus_2z(x)
    gate = 1 / (1 + e)
    # Three times the rounded CUBE: with the rounded 3 * CUBE, this is no slope of the function above (3e-9 of it off).
    slope = gate + x * gate * (1 - gate) * SCALE * (1 + 3 * (CUBE * x * x))
    return x / (1 + e), slope * dx


def _exp_minus_2z(x):
    return jnp.exp(-SCALE * x * (1 + CUBE * x * x))


@ACTIVATIONS.register
@jax.custom_jvp
def gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


@gelu_exact.defjvp
def _exact_jvp(primals, tangents):
    """Differentiates by hand: under shard_map, JAX 0.12 fails to differentiate erfc of what differs between devices."""
    (x,), (dx,) = primals, tangents
    root = math.sqrt(0.5)
    density = root * (2 / math.sqrt(math.pi) * jnp.exp(-jnp.square(x * root)))  # twice the normal density
    slope = (jax.lax.erfc(-x * root) + x * density) / 2
    return gelu_exact(x), slope * dx


@ACTIVATIONS.register
def relu(x: Array) -> Array:
    return jax.nn.relu(x)


@ACTIVATIONS.register
def relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


@ACTIVATIONS.register
def silu(x: Array) -> Array:
    return jax.nn.silu(x)


@ACTIVATIONS.register
def swiglu(x: Array, gate: Array) -> Array:
    return jax.nn.silu(gate) * x


@ACTIVATIONS.register
def clamped_swiglu(x: Array, gate: Array) -> Array:
    gate = jnp.minimum(gate, LIMIT)
    return gate * jax.nn.sigmoid(STEEPNESS * gate) * (jnp.clip(x, -LIMIT, LIMIT) + 1)


@ACTIVATIONS.register
def geglu(x: Array, gate: Array) -> Array:
    return gelu(gate) * x
