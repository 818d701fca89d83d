"""Rotary turns and T5's buckets: what makes them relative, and the closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.shards.positions import RelativeBiasShard, bucket_of, rotary_frequencies, rotate
from tests import sharded, shared

Q, K = sharded.normal(0, 1, 1, 2, 8), sharded.normal(1, 1, 1, 2, 8)


def at(x, position, rotary_dims=8):
    frequency = rotary_frequencies(shared.tiny(d_model=64, heads=8, rotary_dims=rotary_dims))
    return rotate(x, jnp.array([position]), frequency)[0, 0]


@pytest.mark.parametrize("rotary_dims", [8, 6, 2])
def test_dot_products_depend_on_the_distance_alone(rotary_dims):
    dots = lambda query, key: (at(Q, query, rotary_dims) * at(K, key, rotary_dims)).sum(-1)
    for query, key in [(3, 0), (10, 7), (503, 500)]:
        np.testing.assert_allclose(dots(query, key), dots(4, 1), rtol=2e-4, atol=2e-4)
    assert np.abs(dots(4, 1) - dots(4, 2)).max() > 0.1
    one_sided = lambda query, key: (at(Q, query, rotary_dims) * K[0, 0]).sum(-1)  # keys left as they are
    assert np.abs(one_sided(3, 0) - one_sided(10, 7)).max() > 0.1


def test_each_pair_turns_by_its_own_frequency():
    angle = 5 / 10000 ** (np.arange(0, 6, 2) / 6)
    pairs = (Q[0, 0, :, 0:6:2] + 1j * Q[0, 0, :, 1:6:2]) * np.exp(1j * angle)
    expected = np.stack([pairs.real, pairs.imag], -1).reshape(2, 6)
    np.testing.assert_allclose(at(Q, 5, 6)[:, :6], expected, rtol=1e-5, atol=1e-5)


def test_dimensions_that_do_not_rotate_are_untouched():
    np.testing.assert_array_equal(at(Q, 5, 6)[:, 6:], Q[0, 0, :, 6:])
    np.testing.assert_array_equal(at(Q, 0, 8), Q[0, 0])
    assert (np.asarray(at(Q, 5, 8))[:, 6:] != Q[0, 0, :, 6:]).all()


def test_buckets_are_exact_then_logarithmic():
    bucket = np.asarray(bucket_of(jnp.arange(1000), 32))
    np.testing.assert_array_equal(bucket[:16], np.arange(16))
    assert (np.diff(bucket) >= 0).all()
    assert set(bucket) == set(range(32))
    first = {b: int((bucket == b).argmax()) for b in (16, 17, 24, 31)}
    assert first == {16: 16, 17: 19, 24: 46, 31: 113}  # 16 * (128 / 16) ** ((b - 16) / 16), rounded up
    assert (bucket[113:] == 31).all()


def test_the_bias_is_each_heads_own_and_relative():
    config = shared.tiny(mesh="1x4", positions="t5", t5_buckets=8)
    table = sharded.normal(0, 8, 8)
    query, key = np.arange(3, 9, dtype=np.int32), np.arange(10, dtype=np.int32)
    module = lambda query, key: RelativeBiasShard(config)(query, key)
    heads = P(None, "mp")
    bias = sharded.apply(module, config, {"relative_bias": {"table": table}}, query, key, out_specs=heads)
    ahead_is_0 = np.maximum(query[:, None] - key[None, :], 0)
    np.testing.assert_array_equal(bias, table[bucket_of(ahead_is_0, 8)].transpose(2, 0, 1)[None])
    assert (bias[0, 1] != bias[0, 0]).any()
