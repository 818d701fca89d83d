"""Every value of activation=, against its formula in float64 NumPy."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import dense_reference
from shardformer.config import FIELDS, parsing
from shardformer.kernels.activations import ACTIVATIONS
from tests import sharded

GATED = {"swiglu", "geglu", "clamped_swiglu"}  # test_layer.py compares them, as they take a second matrix


def gelu_exact(x):
    return x * np.vectorize(lambda each: 0.5 * (1 + math.erf(each / math.sqrt(2))))(x)


FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": gelu_exact,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}
X = np.linspace(-6, 6, 241)


def test_each_value_of_the_key_has_a_function_and_a_formula():
    values = set(parsing.choices(FIELDS["activation"]))
    assert values == {*ACTIVATIONS} == {*FORMULAS, *GATED}
    assert values == {*dense_reference.ACTIVATIONS, *dense_reference.GATES}


def test_clamped_swiglu_is_that_of_gpt_oss():
    """At values beyond its limits, of which test_layer.py has none."""
    x, gate = np.meshgrid(np.linspace(-9, 9, 73), np.linspace(-9, 9, 73))
    bounded = np.minimum(gate, 7)
    expected = bounded / (1 + np.exp(-1.702 * bounded)) * (np.clip(x, -7, 7) + 1)
    with jax.enable_x64(True):
        np.testing.assert_allclose(ACTIVATIONS["clamped_swiglu"](x, gate), expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(dense_reference.GATES["clamped_swiglu"](x, gate), expected, rtol=1e-12, atol=1e-12)


def distance(name, formula) -> float:
    with jax.enable_x64(True):
        return float(np.abs(np.asarray(ACTIVATIONS[name](X)) - FORMULAS[formula](X)).max())


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_equals_its_formula(name):
    assert distance(name, name) < 1e-12


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_differs_from_the_other_formulas(name):
    assert min(distance(name, other) for other in FORMULAS if other != name) > 1e-4


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_is_the_slope_of_the_formula(name):
    points, step = X + 0.003, 1e-5  # beside 0, where relu has no slope
    slopes = (FORMULAS[name](points + step) - FORMULAS[name](points - step)) / (2 * step)
    with jax.enable_x64(True):
        gradients = np.asarray(jax.vmap(jax.grad(ACTIVATIONS[name]))(points))
    np.testing.assert_allclose(gradients, slopes, atol=1e-9)


@pytest.mark.parametrize("name", [*FORMULAS, *sorted(GATED)])
def test_activation_of_a_shard_has_a_gradient(name):
    """JAX may fail to differentiate a function of arrays that differ between the devices of a shard_map."""
    arrays = (X[:240].astype(np.float32), X[:240].astype(np.float32)[::-1].copy())[: 1 + (name in GATED)]

    def slope(*arrays):
        return jax.grad(lambda *arrays: ACTIVATIONS[name](*arrays).sum(), tuple(range(len(arrays))))(*arrays)

    got = sharded.on_mesh(slope, (2, 2), P(("dp", "mp")), P(("dp", "mp")))(*arrays)
    for x, y in zip(got, exact.run(slope, *arrays).outputs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-14)


@pytest.mark.parametrize("name", FORMULAS)
def test_dense_reference_has_the_formula(name):
    with jax.enable_x64(True):
        np.testing.assert_allclose(dense_reference.ACTIVATIONS[name](X), FORMULAS[name](X), rtol=1e-12, atol=1e-12)
