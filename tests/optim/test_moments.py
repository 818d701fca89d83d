"""Moments in bfloat16: rounded at random, so that their mean is exact and small changes add up."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import optim
from shardformer.errors import UsageError
from shardformer.optim import moments
from tests import shared

STEPS = 20


def test_the_mean_of_many_roundings_is_exact():
    values = np.float32([1.001, -3.14159, 1e-30, 0.1, 65504.5])
    keys = jax.random.split(jax.random.key(0), 4000)
    rounded = np.asarray(jax.vmap(lambda key: moments.round_at_random(jnp.asarray(values), key))(keys), np.float64)
    gap = np.abs(values) * 2.0**-8
    assert (np.abs(rounded - values) <= gap * 2).all()
    assert (np.abs(rounded.mean(0) - values) < gap * 0.05).all()
    nearest = np.asarray(jnp.asarray(values).astype(jnp.bfloat16), np.float64)
    assert (np.abs(nearest - values) > gap * 0.05).any()


def test_rounding_keeps_values_that_bfloat16_holds():
    values = np.float32([0, -0.0, 1.5, -(2.0**-130), np.inf, -np.inf, np.nan, 3.3895314e38])
    got = np.asarray(moments.round_at_random(jnp.asarray(values), jax.random.key(1)), np.float32)
    np.testing.assert_array_equal(got, values)


def test_rounding_keeps_finite_values_finite():
    """Nearest rounding carries float32's maximum to infinity: an infinite moment would stop its weight for good."""
    largest_of_bfloat16 = np.uint32(0x7F7F0000).view(np.float32)
    values = np.array([0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF], np.uint32).view(np.float32)
    assert np.isinf(np.asarray(jnp.asarray(values[2]).astype(jnp.bfloat16), np.float32))
    for seed in range(20):
        got = np.asarray(moments.round_at_random(jnp.asarray(values), jax.random.key(seed)), np.float32)
        np.testing.assert_array_equal(got, np.sign(values) * largest_of_bfloat16)


def test_rounding_keeps_every_nan():
    """Noise added to their bits would carry some of them to infinity, or to zero."""
    bits = np.uint32([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    for seed in range(20):
        assert np.isnan(moments.round_at_random(jnp.asarray(bits.view(np.float32)), jax.random.key(seed))).all()


def test_slow_average_moves_where_nearest_rounding_stands_still():
    start, target, decay = jnp.ones(256), 2.0, 0.999

    def follow(round_):
        def step(mean, i):
            return (round_(decay * mean.astype(jnp.float32) + (1 - decay) * target, i), None)

        return jax.lax.scan(step, start.astype(jnp.bfloat16), jnp.arange(1000))[0].astype(jnp.float32).mean()

    at_random = follow(lambda x, i: moments.round_at_random(x, jax.random.fold_in(jax.random.key(0), i)))
    nearest = follow(lambda x, i: x.astype(jnp.bfloat16))
    assert abs(float(at_random) - (2 - decay**1000)) < 0.01
    assert float(nearest) == 1.0


@pytest.mark.nightly
def test_bfloat16_moments_are_half_as_large_and_train_as_float32():
    """Accumulated gradients are not moments: they stay in float32."""
    options = {"mesh": "4x2", "layers": 1, "optimizer": "muon", "lr_rules": "k=frozen"}
    options |= {"accum": 2, "accum_mode": "multisteps", "zero": 1}
    losses, sizes = [], []
    for kind in ("float32", "bfloat16"):
        t = shared.trainer(moment_dtype=kind, **options)
        state = jax.device_put(shared.on_host(t.init()), t.shardings)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.optimizer.acc_grads)} == {"float32"}
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer.inner_opt_state)))
        for step in range(STEPS):
            state, metrics = t.step(state, shared.batch(0), step)
        losses.append(t.read_metrics(metrics).loss)
    assert losses[0] != losses[1]
    assert abs(losses[1] / losses[0] - 1) < 2e-2
    assert sizes[1] < 0.55 * sizes[0]


def round_equal_moments(seed: int, step: int) -> list[bytes]:
    """Returns the bytes of each rounded moment of four parameters; before rounding all are equal."""
    optimizer = optim.make_optimizer(shared.tiny(mesh="1x1"))
    state = optimizer.init({"transformer/layers": {name: jnp.zeros((8, 64)) for name in ("q", "k", "up", "down_bias")}})
    state = jax.tree.map(lambda x: jnp.full_like(x, 1.001) if x.ndim else x, state)
    rounded = moments.round_moments(optimizer, state, jnp.int32(step), seed)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(rounded) if leaf.ndim]


def test_rounding_noise_differs_between_leaves():
    moments = round_equal_moments(seed=0, step=3)
    assert len(set(moments)) == len(moments) == 8  # two moments of each parameter


def test_rounding_noise_differs_between_steps_and_seeds():
    first = round_equal_moments(seed=0, step=3)
    assert first == round_equal_moments(seed=0, step=3)
    assert not set(first) & set(round_equal_moments(seed=0, step=4))
    assert not set(first) & set(round_equal_moments(seed=1, step=3))


def test_rounding_noise_of_a_step_is_kept():
    """A resumed run rounds as the version that began it."""
    moments = round_equal_moments(seed=2, step=3)
    assert hashlib.sha256(b"".join(moments)).hexdigest()[:16] == "30f1a8e3a87c3eab"


def test_lbfgs_keeps_all_digits():
    with pytest.raises(UsageError):
        shared.tiny(optimizer="lbfgs", clip=0.0, weight_decay=0.0, moment_dtype="bfloat16")
