"""`jax.custom_transforms`: a rule that is defined afterwards replaces the derivative, under jit and vmap too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.legacy.install import installed


@pytest.fixture
def product():
    with installed():

        @jax.custom_transforms
        def product(x, y):
            """Multiplies."""
            return x * y

        yield product


X, Y = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])


def gradients(function):
    return [np.asarray(part) for part in jax.jit(jax.grad(lambda x, y: function(x, y).sum(), (0, 1)))(X, Y)]


def all_of(function):
    jax.defvjp_all(function, lambda x, y: (x * y, lambda cotangent: (10 * cotangent * y, 100 * cotangent * x)))


def each(function):
    jax.defvjp(function, lambda ct, result, x, y: 10 * ct * result / x, lambda ct, result, x, y: 100 * ct * x)


def tangent(function):
    jax.defjvp_all(function, lambda x, t: (x[0] * x[1], 10 * t[0] * x[1] + 100 * t[1] * x[0]))


def tangents(function):
    jax.defjvp(function, lambda t, result, x, y: 10 * t * y, lambda t, result, x, y: 100 * t * x)


@pytest.mark.parametrize("define", [all_of, each, tangent, tangents])
def test_a_rule_replaces_the_derivative(product, define):
    define(product)
    assert product.__doc__ == "Multiplies."
    np.testing.assert_array_equal(product(X, Y), X * Y)
    np.testing.assert_array_equal(jax.vmap(product)(X, Y), X * Y)
    for got, expected in zip(gradients(product), (10 * Y, 100 * X), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_a_rule_the_derivative_is_that_of_the_operations(product):
    for got, expected in zip(gradients(product), (Y, X), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_no_rule_for_an_argument_means_no_gradient(product):
    jax.defvjp(product, None, lambda ct, result, x, y: ct * x)
    for got, expected in zip(gradients(product), (0 * Y, X), strict=True):
        np.testing.assert_array_equal(got, expected)
    jax.defjvp(product, lambda t, result, x, y: t * y, None)
    for got, expected in zip(gradients(product), (Y, 0 * X), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_names_go_with_uninstall():
    with installed():
        assert jax.defvjp_all
    assert not hasattr(jax, "custom_transforms")
