"""A softmax over slots that shards of the context hold, against NumPy in float64."""

import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.parallel.context import SplitContext
from tests import asserts, sharded

LOGITS = sharded.normal(0, 2, 1, 3, 8) + np.repeat(np.float32([0, 200, -200, 50]), 2)  # far apart between shards
VALUES = sharded.normal(1, 2, 1, 8, 4)


SINKS = sharded.normal(2, 1, 1, 3, 1) + np.float32(200)


def weigh(cp: int, run=sharded.on_mesh, sinks=None) -> np.ndarray:
    split = P(None, None, None, "cp"), P(None, None, "cp"), P()
    return run(SplitContext().weigh_values, (cp,), split, P(), axes=("cp",))(LOGITS, VALUES, sinks)


def expected(sinks=-np.inf) -> np.ndarray:
    logits = np.asarray(LOGITS, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True) + np.exp(np.float64(sinks) - logits.max(-1, keepdims=True))
    return np.einsum("bgrs,bgsk->bgrk", weights / total, np.asarray(VALUES, np.float64))


@pytest.mark.parametrize("cp", [2, 4])
def test_softmax_over_shards_is_that_of_one_device(cp):
    np.testing.assert_allclose(weigh(cp), expected(), rtol=1e-13)


@pytest.mark.parametrize("above", [0, 300])
def test_sink_is_counted_once_whatever_its_size(above):
    """Among the largest logits, and far above all of them."""
    sinks = SINKS + np.float32(above)
    np.testing.assert_allclose(weigh(4, sinks=sinks), expected(sinks), rtol=1e-12)
    assert asserts.relative(expected(), expected(sinks)) > 0.1


def test_compiled_softmax_is_that_of_one_device():
    assert asserts.relative(weigh(4, run=sharded.compile_on_mesh), expected()) < 1e-6


def test_maximum_of_each_shard_is_seen(broken):
    """The negative twin: each shard subtracts its own maximum."""
    broken(lax, "pmax", lambda x, _: x)
    with np.testing.assert_raises(AssertionError):
        np.testing.assert_allclose(weigh(4), expected())
