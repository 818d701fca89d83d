"""The complement of a log-probability keeps its digits at both ends."""

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.objectives.preference_model import log_complement

LOGP = np.array([-1e-7, -1e-5, -1e-2, -0.5, -np.log(2), -1, -5, -20], np.float32)


def test_complement_is_exact_at_both_ends():
    """1 - exp(x) of a number near 0 has lost its digits in float32."""
    exact = np.log1p(-np.exp(LOGP.astype(np.float64)))
    np.testing.assert_allclose(log_complement(jnp.asarray(LOGP)), exact, rtol=1e-6)


def test_slope_of_the_complement_is_exact_at_both_ends():
    x = LOGP.astype(np.float64)
    slope = jax.vmap(jax.grad(log_complement))(jnp.asarray(LOGP))
    np.testing.assert_allclose(slope, 1 / np.expm1(x) * np.exp(x), rtol=1e-6)


def test_empty_slot_has_no_infinite_complement():
    assert np.isfinite(log_complement(jnp.float32(0)))
    assert np.isfinite(jax.grad(log_complement)(jnp.float32(0)))
