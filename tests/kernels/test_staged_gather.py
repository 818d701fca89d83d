"""All-gathers in stages over the factors of a mesh axis."""

import re

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.kernels import staged_gather
from tests import asserts, sharded

X = sharded.normal(0, 8, 6, 16)


def on_mesh(stages, dimension=0):
    """Returns the function that gathers parts of rows or columns; every device returns the full array."""

    def body(x):
        return staged_gather.gather_parts(x, dimension, stages, "dp")[None]

    spec = P("dp") if dimension == 0 else P(None, None, "dp")
    return sharded.on_mesh(body, (8, 1), (spec,), P("dp"))


@pytest.mark.parametrize("stages", [(), (8,), (2, 4), (2, 2, 2), (1, 2, 2, 2)])
@pytest.mark.parametrize("dimension", [0, 2])
def test_every_device_has_all_parts_in_order(monkeypatch, stages, dimension):
    monkeypatch.setattr(staged_gather, "AT_ONCE", 4)
    for got in on_mesh(stages, dimension)(X):
        np.testing.assert_array_equal(got, X)


@pytest.mark.parametrize(("stages", "most", "found"), [((2, 4), 4, 1), ((2, 2, 2), 8, 1), ((2, 2, 2), 4, 2)])
def test_three_dimensions_of_many_devices_are_two_stages(monkeypatch, stages, most, found):
    monkeypatch.setattr(staged_gather, "AT_ONCE", most)
    assert len(re.findall("stablehlo.all_gather", on_mesh(stages).lower(X).as_text())) == found


def test_stages_in_another_order_swap_parts(monkeypatch):
    """The twin: the slowest factor first."""
    monkeypatch.setattr(staged_gather, "AT_ONCE", 4)
    right = staged_gather.find_groups
    monkeypatch.setattr(staged_gather, "find_groups", lambda stages: right(stages)[::-1])
    assert asserts.relative(np.asarray(on_mesh((2, 2, 2))(X)[0]), X) > 0.5
