"""The loop over layers against a plain loop in Python, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.layout.choose_layers import Loop
from shardformer.shards.transformer import run_layers
from tests import asserts

COUNT, D = 7, 5
MATRICES = np.random.default_rng(0).normal(size=(COUNT, D, D)).astype(np.float32)
X = np.arange(D, dtype=np.float32)
FACTORS = (1.0, 2.0, 3.0)


def kind(factor):
    def layer(x, inputs):
        matrix, index = inputs
        x = jnp.tanh(x @ matrix * factor)
        return x, {"index": index, "x": x}

    return layer


def run(kinds, scan):
    layers = [kind(factor) for factor in kinds]

    def total(matrices):
        index = jnp.arange(COUNT) if scan else list(range(COUNT))
        x, outputs = run_layers(layers, (matrices, index), X, COUNT, Loop(scan, len(layers)))
        return x.sum(), outputs

    return exact.run(jax.value_and_grad(total, has_aux=True), MATRICES).outputs


def expected(kinds):
    def total(matrices):
        x, found = X, []
        for i in range(COUNT):
            x = jnp.tanh(x @ matrices[i] * kinds[i % len(kinds)])
            found.append(x)
        return x.sum(), found

    return exact.run(jax.value_and_grad(total, has_aux=True), MATRICES).outputs


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("kinds", [FACTORS[:1], FACTORS], ids=["one-kind", "three-kinds"])
def test_layer_types_repeat_in_order(kinds, scan):
    """Seven layers: two groups of three, and one that fills no group."""
    (value, outputs), grads = run(kinds, scan)
    (wanted, found), wanted_grads = expected(kinds)
    assert [int(output["index"]) for output in outputs] == list(range(COUNT))
    assert asserts.relative(np.stack([output["x"] for output in outputs]), found) < 1e-14
    assert asserts.relative(value, wanted) < 1e-14
    assert asserts.relative(grads, wanted_grads) < 1e-13
    assert abs(expected(kinds[::-1] if len(kinds) > 1 else (2.0,))[0][0] - wanted) > 1e-3  # the twin
