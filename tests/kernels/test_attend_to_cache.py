"""One new token attends to a cache that is longer than its window, against NumPy, both in float64."""

import numpy as np

from shardformer import exact
from shardformer.kernels.attention import AttentionOptions, Cache, Plain
from tests import asserts, sharded

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


def attend_to_cache(q, k, v, cache, position, slot, window, stored=None):
    options = AttentionOptions(position, slot=slot, window=window, stored=stored)
    return Plain().attend_to_cache(q, k, v, cache, options)


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def test_cache_longer_than_the_window_is_masked():
    for window in (1, 3, POSITION + 1):
        values, _ = run_exactly(
            attend_to_cache, Q, K, V, CACHE, np.int32([POSITION]), np.int32(POSITION), np.int32(window)
        )
        np.testing.assert_allclose(values, attend_plainly(window), rtol=1e-12)
        assert np.abs(values - attend_plainly(window % 6 + 1)).max() > 1e-2  # another window


def attend_one_by_one(new, first: int, window: int):
    values, cache = [], CACHE
    for i in range(new[0].shape[1]):
        slot = np.int32(first + i)
        each = (x[:, i : i + 1] for x in new)
        value, cache = run_exactly(attend_to_cache, *each, cache, slot[None], slot, np.int32(window))
        values.append(value)
    return np.concatenate(values, axis=1), cache


def test_several_tokens_attend_as_one_after_another():
    """Three tokens cross the end of the ring; the fourth is padding, which is not stored."""
    new, first = [sharded.normal(seed, 2, 4, 3, 4) for seed in range(5, 8)], np.int32(SLOTS - 2)
    expected, expected_cache = attend_one_by_one([x[:, :3] for x in new], SLOTS - 2, 4)
    arguments = *new, CACHE, first + np.arange(4, dtype=np.int32), first, np.int32(4)
    values, cache = run_exactly(attend_to_cache, *arguments, np.int32(3))
    np.testing.assert_allclose(values[:, :3], expected, rtol=1e-12)
    np.testing.assert_array_equal(cache, expected_cache)
    assert (np.asarray(run_exactly(attend_to_cache, *arguments, np.int32(4))[1]) != np.asarray(expected_cache)).any()


def test_compiled_cache_is_the_exact_one():
    slot = np.int32(POSITION)
    asserts.assert_compiled_is_exact(attend_to_cache, Q, K, V, CACHE, slot[None], slot, np.int32(3))
