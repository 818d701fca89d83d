"""Accumulation over calls: the mean so far, and what an unfinished step leaves behind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer.optim import chain

GRADIENTS = [{"w": jnp.float32(value)} for value in (1.0, 4.0, 10.0)]


@pytest.fixture
def optimizer():
    return chain.accumulate_over_calls(optax.sgd(1.0), 3)


def test_mean_gradient_is_that_of_all_calls_so_far(optimizer):
    state = optimizer.init(GRADIENTS[0])
    for gradient, mean in zip(GRADIENTS, (1.0, 2.5, 5.0), strict=True):
        assert float(chain.mean_gradient(state, gradient)["w"]) == mean
        updates, state = optimizer.update(gradient, state, gradient)
    assert float(updates["w"]) == -5.0


def test_reset_forgets_the_gradients_of_an_unfinished_step(optimizer):
    start = optimizer.init(GRADIENTS[0])
    _, state = optimizer.update(GRADIENTS[0], start, GRADIENTS[0])
    assert int(state.mini_step) == 1
    jax.tree.map(np.testing.assert_array_equal, chain.reset_accumulation(state), start)
