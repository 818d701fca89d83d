"""The average of the weights against the same in float64, and what it leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.optim import average
from tests import asserts, shared

LAYERS = "transformer/layers"


def averaged(config, values):
    """After each value in turn."""

    def tree(value):
        return {LAYERS: {"q": jnp.asarray(value)}}

    found = average.start_average(tree(values[0]), config)
    update = jax.jit(lambda found, value, step: average.update_average(found, tree(value), step, config))
    for step, value in enumerate(values):
        found = update(found, value, jnp.int32(step))
    return average.replace_by_average(found, tree(values[-1]), len(values), config)[LAYERS]["q"]


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_it_is_the_weighted_mean_of_all_steps(decay):
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    weights = decay ** np.arange(len(values))[::-1]
    expected = (weights[:, None] * values.astype(np.float64)).sum(0) / weights.sum()
    assert asserts.relative(averaged(shared.tiny(ema=decay), values), expected) < 1e-6


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
def test_what_does_not_move_is_exact_from_the_first_step(decay):
    """A sum that is divided by its weight at the end is not: it was off by 6e-4 at 0.9999."""
    constant = np.random.default_rng(0).normal(size=64).astype(np.float32)
    for steps in (1, 2, 100):
        np.testing.assert_array_equal(averaged(shared.tiny(ema=decay), [constant] * steps), constant)


def test_before_the_first_step_it_is_the_weights():
    """A base's too, though a run begins with an average of its seed."""
    found, base = ({LAYERS: {"q": jnp.float32(value)}} for value in (3, -5))
    assert average.replace_by_average(found, base, 0, shared.tiny(ema=0.5)) == base
    assert average.replace_by_average(found, base, 1, shared.tiny(ema=0.5)) == found


def test_average_in_float32_is_not_copied():
    found = {LAYERS: {"q": jnp.ones(2)}}
    assert average.replace_by_average(found, found, 1, shared.tiny(ema=0.5))[LAYERS]["q"] is found[LAYERS]["q"]


def test_average_before_the_rounding_is_float():
    config = shared.tiny(ema=0.5, quantize_aware="int8", quantize_after=3, mesh="1x1")
    found = {LAYERS: {"up": jnp.linspace(0.1, 1, 12).reshape(1, 4, 3)}}
    before, after = (average.replace_by_average(found, found, steps, config)[LAYERS]["up"] for steps in (2, 3))
    np.testing.assert_array_equal(before, found[LAYERS]["up"])
    assert np.abs(after - before).max() > 1e-4


def test_average_is_rounded_as_the_run_stores_it():
    config = shared.tiny(ema=0.5, dtype="bfloat16", param_dtype="bfloat16")
    found = {LAYERS: {"q": jnp.full((1, 2, 2), 1 / 3)}, "transformer/embed": {"tokens": jnp.full((2, 2), 1 / 3)}}
    rounded = average.replace_by_average(found, found, 1, config)
    assert rounded[LAYERS]["q"].dtype == "bfloat16"
    assert rounded["transformer/embed"]["tokens"].dtype == "float32"


def test_the_first_step_counts_whole():
    first, second = np.float32(3), np.float32(-5)
    found = average.start_average({LAYERS: {"q": jnp.asarray(first)}}, shared.tiny(ema=0.999))
    after = average.update_average(found, {LAYERS: {"q": jnp.asarray(second)}}, jnp.int32(0), shared.tiny(ema=0.999))
    np.testing.assert_allclose(after[LAYERS]["q"], second, rtol=1e-6)


def test_what_is_frozen_has_no_average():
    parameters = {LAYERS: {"q": jnp.zeros(2), "up": jnp.zeros(2)}}

    def chosen(**changes):
        return average.select_averaged(parameters, shared.tiny(**changes)).get(LAYERS, {}).keys()

    assert chosen(ema=0.9) == {"q", "up"}
    assert chosen(ema=0.9, lr_rules="up=frozen,q=2x") == {"q"}
    assert chosen() == set()
