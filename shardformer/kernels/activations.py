"""The activations of the feed-forward, by the values of `activation=`."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

SCALE, CUBE = math.sqrt(8 / math.pi), 0.044715


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


ACTIVATIONS: dict[str, Callable] = {
    "gelu": gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,  # of the gate
    "geglu": gelu,
}
