"""Reduce-scatters in stages over the factors of a mesh axis."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.kernels import staged_scatter
from tests import asserts, sharded

X = sharded.normal(0, 8, 24, 2)  # one [24, 2] for each place on dp


def on_mesh(stages, dimension=0, ring=""):
    def body(x):
        return staged_scatter.scatter_sum(x[0], dimension, stages, "dp", ring)[None]

    return sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp"))


@pytest.mark.parametrize("stages", [(), (8,), (2, 4), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("ring", ["", "float32"])
def test_staged_scatter_leaves_the_slices_of_one_stage(stages, ring):
    got = on_mesh(stages, ring=ring)(X)
    np.testing.assert_allclose(got.reshape(24, 2), X.sum(0), rtol=1e-5, atol=1e-6)


def test_columns_are_scattered_too():
    columns = X.swapaxes(1, 2)
    for stages in ((2, 4), (4, 2)):
        got = np.concatenate(np.asarray(on_mesh(stages, 1, "float32")(columns)), -1)
        np.testing.assert_allclose(got, columns.sum(0), rtol=1e-5, atol=1e-6)


def test_groups_in_another_order_swap_slices(monkeypatch):
    """The twin: the fastest factor first. All sums are there, and lie elsewhere."""
    right = staged_scatter._groups_of_stages
    monkeypatch.setattr(staged_scatter, "_groups_of_stages", lambda stages: right(stages)[::-1])
    got = np.asarray(on_mesh((4, 2))(X)).reshape(24, 2)
    assert asserts.relative(got, X.sum(0)) > 0.5
    np.testing.assert_allclose(np.sort(got.ravel()), np.sort(X.sum(0).ravel()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stages", [(2, 4), (4, 2)])
def test_the_longest_stage_sends_first(stages):
    """64 rows: 3 hops of 16 rows among 4, half each way; then one hop of 8 rows between 2."""
    text = on_mesh(stages, ring="float32").lower(jnp.zeros((8, 64, 2))).as_text()
    shapes = re.findall(r"collective_permute.*-> tensor<([\dx]+)xf32>", text)
    assert [np.prod([*map(int, shape.split("x"))]) for shape in shapes] == 6 * [8 * 2] + [8 * 2]
