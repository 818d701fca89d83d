"""One new token attends to a cache that is longer than its window, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np

from shardformer.kernels.attention import AttentionOptions, Cache, Plain
from tests import sharded

SLOTS, POSITION = 8, 6
Q, K, V = (sharded.normal(seed, 2, 1, 3, 4) for seed in range(3))
CACHE = Cache(sharded.normal(3, 2, 3, SLOTS, 4), sharded.normal(4, 2, 3, SLOTS, 4))


def attend_plainly(window: int) -> np.ndarray:
    keys, values = (np.array(x, np.float64) for x in CACHE)
    keys[:, :, POSITION], values[:, :, POSITION] = K[:, 0], V[:, 0]
    seen = slice(POSITION - window + 1, POSITION + 1)
    logits = np.einsum("bhk,bhsk->bhs", np.asarray(Q[:, 0], np.float64), keys[:, :, seen]) / 2
    weights = np.exp(logits)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhs,bhsk->bhk", weights, values[:, :, seen])[:, None]


def test_cache_longer_than_the_window_is_masked():
    for window in (1, 3, POSITION + 1):
        options = AttentionOptions(jnp.array([POSITION], jnp.int32), slot=jnp.int32(POSITION), window=window)
        values, _ = Plain().attend_to_cache(Q, K, V, CACHE, options)
        np.testing.assert_allclose(values, attend_plainly(window), rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(values) - attend_plainly(window % 6 + 1)).max() > 1e-2  # another window


def attend_one_by_one(new, first: int, window: int):
    values, cache = [], CACHE
    for i in range(new[0].shape[1]):
        slot = jnp.int32(first + i)
        options = AttentionOptions(slot[None], slot=slot, window=window)
        value, cache = Plain().attend_to_cache(*(x[:, i : i + 1] for x in new), cache, options)
        values.append(value)
    return np.concatenate(values, axis=1), cache


def test_several_tokens_attend_as_one_after_another():
    """Three tokens cross the end of the ring; the fourth is padding, which is not stored."""
    new, first = [sharded.normal(seed, 2, 4, 3, 4) for seed in range(5, 8)], jnp.int32(SLOTS - 2)
    expected, expected_cache = attend_one_by_one([x[:, :3] for x in new], SLOTS - 2, 4)
    options = AttentionOptions(first + jnp.arange(4), slot=first, window=4, stored=jnp.int32(3))
    values, cache = Plain().attend_to_cache(*new, CACHE, options)
    np.testing.assert_allclose(values[:, :3], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cache, expected_cache)
    options = options._replace(stored=jnp.int32(4))
    assert (np.asarray(Plain().attend_to_cache(*new, CACHE, options)[1]) != np.asarray(expected_cache)).any()
