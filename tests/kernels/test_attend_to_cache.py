"""One new token attends to a cache that is longer than its window, against NumPy, both in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer import exact
from shardformer.kernels.attention import AttentionOptions, Cache, Plain, drop_single_axes, put_in_slot
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


PLAIN = Plain()


class PutByRow(Plain):
    """Attention with an update of the cache that JAX maps over rows: as a scatter."""

    def put(self, cached_BgSK, new_B1gK, slot):
        return lax.dynamic_update_slice_in_dim(cached_BgSK, jnp.swapaxes(new_B1gK, 1, 2), slot, axis=2)


def count_copies(rows: int, method=PLAIN, drop=drop_single_axes) -> int:
    """Returns how many caches the program of a loop over tokens copies."""
    q, k, v = (sharded.normal(seed, rows, 1, 1, 3, 4) for seed in range(3))
    caches = Cache(*(sharded.normal(seed, rows, 3, SLOTS, 4) for seed in (3, 4)))

    def restore(flat):
        return jax.tree.map(lambda x, full: x.reshape(full.shape), flat, caches)

    def draw(caches, q, k, v):
        def attend(q, k, v, cache, slot):
            options = AttentionOptions(slot[None], slot=slot)
            cache = jax.tree.map(lambda x_hSK: x_hSK[None], cache)
            values, cache = method.attend_to_cache(q, k, v, cache, options)
            return values, jax.tree.map(lambda x_1hSK: x_1hSK[0], cache)

        def step(slot, carry):
            values, flat = carry
            values, new = jax.vmap(attend, (0, 0, 0, 0, None))(q + values, k, v, restore(flat), slot)
            return values, drop(new)

        values, flat = lax.fori_loop(0, POSITION, step, (q, drop(caches)))
        return values, restore(flat)

    text = jax.jit(draw, donate_argnums=0).lower(caches, q, k, v).compile().as_text()
    return len(re.findall(rf"f32\[(?:\d+,)*{SLOTS},4\]\S* copy\(", text))


def test_loop_over_tokens_copies_no_cache():
    assert count_copies(rows=1) == count_copies(rows=2) == 0


@pytest.mark.parametrize(("rows", "options"), [(1, {"drop": lambda caches: caches}), (2, {"method": PutByRow()})])
def test_other_loops_copy_caches(rows, options):
    assert count_copies(rows, **options) > 0


@pytest.mark.parametrize(("rows", "slots"), [(1, 5), (1, [5]), (3, 5), (3, [5, 0, 7])])
def test_each_row_is_put_into_its_slot(rows, slots):
    cached, new = sharded.normal(0, rows, 2, 1, SLOTS, 4), sharded.normal(1, rows, 2, 1, 1, 4)
    put = jax.vmap(put_in_slot, (0, 0, 0 if isinstance(slots, list) else None))
    expected = np.array(cached)
    for row, slot in enumerate(np.broadcast_to(slots, rows)):
        expected[row, :, :, slot] = new[row, :, :, 0]
    np.testing.assert_array_equal(run_exactly(put, cached, new, np.int32(slots)), np.float64(expected))
    assert (expected != np.asarray(cached)).sum() == new.size
