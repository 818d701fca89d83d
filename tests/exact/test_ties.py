"""Ties are broken as on a device: equal values of a top-k and of an argmax, and halves that are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer import exact

EQUAL = np.array([[1, 3, 3, 2, 3, 0], [5, 5, 5, 5, 5, 5], [0, -1, 0, -1, 0, -1]], np.float32)
HALVES = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], np.float32)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: lax.top_k(x, 4), EQUAL), (lambda x: jnp.argmax(x, -1), EQUAL), (lambda x: jnp.argmin(x, -1), EQUAL),
        (lambda x: jnp.argsort(x, -1), EQUAL), (jnp.round, HALVES), (lax.round, HALVES),
    ],
    ids=["top_k", "argmax", "argmin", "argsort", "to even", "away from zero"],
)  # fmt: skip
def test_ties_are_those_of_a_device(function, x):
    for got, expected in zip(
        jax.tree.leaves(exact.run(function, x).outputs), jax.tree.leaves(jax.jit(function)(x)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
