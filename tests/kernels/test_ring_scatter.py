"""Reduce-scatters as rings of sends between neighbours."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.kernels import ring_scatter
from tests import asserts, sharded

X = sharded.normal(0, 8, 24, 2)  # one [24, 2] for each place on dp
COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]
ALL = [list(range(8))]


def scattered(groups, dimension=0, dtype="float32", values=X):
    def body(x):
        return ring_scatter.ring_scatter(x[0], "dp", groups, dimension, dtype)[None]

    return np.asarray(sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp"))(values))


@pytest.mark.parametrize(("groups", "dimension"), [(ALL, 0), (COLUMNS, 0), (COLUMNS, 1)])
def test_ring_leaves_the_slice_of_each_member(groups, dimension):
    """By NumPy; 24 rows on 8 devices are slices of 3, which have no halves."""
    got = scattered(groups, dimension)
    for group in groups:
        for place, slice_ in enumerate(np.split(X[group].sum(0), len(group), dimension)):
            np.testing.assert_allclose(got[group[place]], slice_, rtol=1e-5, atol=1e-6)


def test_ring_that_turns_back_leaves_other_slices(monkeypatch):
    """The twin: a wrong place in the group."""
    right = ring_scatter._place_in_group
    monkeypatch.setattr(ring_scatter, "_place_in_group", lambda axis, groups: len(groups[0]) - 1 - right(axis, groups))
    assert asserts.relative(scattered(ALL).reshape(24, 2), X.sum(0)) > 0.5


def test_bfloat16_rounds_the_addends_and_each_partial_sum():
    """Rounding is by up to 2^-9: once of the addends, then of six partial sums; the last is not rounded."""
    values = np.abs(X) + 1
    got, exact = scattered(ALL, dtype="bfloat16", values=values).reshape(24, 2), values.sum(0)
    assert 1e-5 < np.abs(got / exact - 1).max() < 7 * 2**-9


def test_even_slices_go_around_in_both_directions():
    def body(x):
        return ring_scatter.ring_scatter(x[0], "dp", ALL, 0, "float32")[None]

    even = jnp.zeros((8, 32, 2))
    text = sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp")).lower(even).as_text()
    sends = re.findall(r"collective_permute.*?dense<\[\[(\d, \d)\]", text)
    assert sends.count("0, 1") == sends.count("0, 7") == 7


def test_reduce_scatter_agrees_with_the_ring():
    def body(x):
        return lax.psum_scatter(x[0], "dp", scatter_dimension=0, tiled=True)[None]

    want = np.asarray(sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp"))(X))
    np.testing.assert_allclose(scattered(ALL), want, rtol=1e-5, atol=1e-6)
