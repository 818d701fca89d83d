"""T5's buckets against their closed form, ALiBi's slopes against published ones, and the bias of each head."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.shards.positions import RelativeBiasShard, alibi_slopes, bucket_of
from tests import sharded, shared


def test_buckets_are_exact_then_logarithmic():
    bucket = np.asarray(bucket_of(jnp.arange(1000), 32))
    np.testing.assert_array_equal(bucket[:16], np.arange(16))
    assert (np.diff(bucket) >= 0).all()
    assert set(bucket) == set(range(32))
    first = {b: int((bucket == b).argmax()) for b in (16, 17, 24, 31)}
    assert first == {16: 16, 17: 19, 24: 46, 31: 113}  # 16 * (128 / 16) ** ((b - 16) / 16), rounded up
    assert (bucket[113:] == 31).all()


def test_relative_bias_depends_on_head_and_distance():
    config = shared.tiny(mesh="1x4", positions="t5")
    table = sharded.normal(0, 32, 8)
    query, key = np.arange(3, 9, dtype=np.int32), np.arange(10, dtype=np.int32)

    def module(query, key):
        return RelativeBiasShard(config)(query, key)

    heads = P(None, "mp")
    bias = sharded.apply(module, config, {"relative_bias": {"table": table}}, query, key, out_specs=heads)
    ahead_is_0 = np.maximum(query[:, None] - key[None, :], 0)
    np.testing.assert_array_equal(bias, table[bucket_of(ahead_is_0)].transpose(2, 0, 1)[None])
    assert (bias[0, 1] != bias[0, 0]).any()


def test_alibi_slopes_are_those_of_the_paper():
    """Press et al., 2021: 1/2, 1/4, ... 1/256 for 8 heads; twelve heads take 2**-0.5, 2**-1.5, ... as well."""
    np.testing.assert_array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(12), 0.5 ** np.r_[1:9, 0.5:4.5], rtol=1e-6)
    assert alibi_slopes(1).tolist() == [0.5**8]


def test_alibi_bias_falls_by_each_heads_slope():
    config = shared.tiny(mesh="1x4", positions="alibi")
    query, key = np.arange(3, 9, dtype=np.int32), np.arange(10, dtype=np.int32)

    def module(query, key):
        return RelativeBiasShard(config)(query, key)

    bias = sharded.apply(module, config, {}, query, key, out_specs=P(None, "mp"))
    ahead_is_0 = np.maximum(query[:, None] - key[None, :], 0)
    np.testing.assert_array_equal(bias[0], -(0.5 ** np.arange(1, 9))[:, None, None] * ahead_is_0)
