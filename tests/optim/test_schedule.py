"""The learning rate of each schedule, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import optim
from shardformer.config import Config
from shardformer.errors import UsageError

BASE = Config.of(lr=1e-2, lr_min=1e-3, warmup=10, steps=110)


def rates(**changes) -> np.ndarray:
    config = BASE.replace(**changes)
    with jax.numpy_dtype_promotion("standard"):  # as the chain itself calls it
        return np.array(jax.vmap(optim.learning_rate(config))(jnp.arange(config.training.steps + 10)))


def test_schedule_rises_to_its_peak_and_falls_to_its_end():
    rate = rates()
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) * 1e-3, rtol=1e-6)  # the first step learns too
    assert rate.argmax() in (9, 10)
    np.testing.assert_allclose(rate[[10, 60, 110, 119]], [1e-2, 5.5e-3, 1e-3, 1e-3], rtol=1e-5)
    assert (np.diff(rate[10:111]) < 0).all()


@pytest.mark.parametrize(
    "changes", [{"warmup": 0}, {"warmup": 0, "steps": 1}, {"warmup": 1}, {"warmup": 1, "steps": 1}]
)
def test_without_a_warm_up_the_peak_comes_first(changes):
    rate = rates(**changes)
    np.testing.assert_allclose(rate[0], 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rate[-1], 1e-3, rtol=1e-5)


@pytest.mark.parametrize("warmup", [20, 21, 1000])
def test_a_warm_up_longer_than_the_run_still_ends_at_the_end(warmup):
    rate = rates(warmup=warmup, steps=20)
    assert rate.argmax() in (18, 19)
    np.testing.assert_allclose(rate.max(), 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rate[20:], 1e-3, rtol=1e-5)


def test_decay_steps_end_the_cosine_before_the_run():
    rate = rates(decay_steps=50)
    assert rate[49] > 1e-3
    np.testing.assert_allclose(rate[50:], 1e-3, rtol=1e-5)


def test_a_rate_below_lr_min_never_climbs_to_it():
    rate = rates(lr=1e-4)
    np.testing.assert_allclose(rate[10:], 1e-4, rtol=1e-6)


def test_no_rate_at_all():
    assert not rates(lr=0.0).any()


def test_wsd_is_constant_until_its_decay():
    rate = rates(schedule="wsd", decay=20)
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) * 1e-3, rtol=1e-6)
    np.testing.assert_allclose(rate[9:91], 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rate[90:111], np.linspace(1e-2, 1e-3, 21), rtol=1e-5)
    np.testing.assert_allclose(rate[110:], 1e-3, rtol=1e-5)


@pytest.mark.parametrize(("changes", "last_peak"), [({}, 99), ({"decay_steps": 60}, 54), ({"decay": 1000}, 10)])
def test_wsd_decays_for_a_tenth_by_default(changes, last_peak):
    """A decay that is longer than the run begins after the warm-up."""
    rate = rates(schedule="wsd", **changes)
    assert (rate[9 : last_peak + 1] > 0.99999e-2).all()
    assert rate[last_peak + 1] < 0.999e-2


def test_linear_falls_by_equal_parts():
    np.testing.assert_allclose(rates(schedule="linear")[10:111], np.linspace(1e-2, 1e-3, 101), rtol=1e-5)


def test_constant_keeps_its_peak():
    np.testing.assert_allclose(rates(schedule="constant")[9:], 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rates(schedule="constant", warmup=1000)[:110], np.arange(1, 111) * 1e-5, rtol=1e-4)


def test_more_steps_change_no_rate_before_the_decay_of_wsd():
    """So a run of more steps can be branched from a checkpoint before the decay."""
    short, long = rates(schedule="wsd", decay=20), rates(schedule="wsd", decay=20, steps=300)
    np.testing.assert_array_equal(short[:91], long[:91])
    assert (short[:91] != rates(schedule="cosine", steps=300)[:91]).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decay": 5}, "decay does nothing without schedule=wsd"),
        ({"schedule": "constant", "decay_steps": 5}, "decay_steps does nothing with"),
        ({"schedule": "steps"}, "cosine, wsd, linear"),
    ],
)
def test_key_without_an_effect_is_rejected(changes, words):
    with pytest.raises(UsageError, match=words):
        BASE.override(changes)
