"""Reduce-scatters as one exchange of parts."""

import re

import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.kernels.exchange_scatter import exchange_scatter
from tests import asserts, sharded

X = sharded.normal(0, 8, 24, 16)  # one [24, 16] for each place on dp


def on_mesh(dimension=0, dtype="float32"):
    def body(x):
        return exchange_scatter(x[0], "dp", dimension, dtype)[None]

    return sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp"))


@pytest.mark.parametrize("dimension", [0, 1])
def test_each_device_keeps_the_sum_of_its_slice(dimension):
    got = np.asarray(on_mesh(dimension)(X))
    for place, slice_ in enumerate(np.split(X.sum(0), 8, dimension)):
        np.testing.assert_allclose(got[place], slice_, rtol=1e-5, atol=1e-6)


def test_parts_that_stay_at_home_are_no_sum(monkeypatch):
    """The twin: nothing is sent."""
    monkeypatch.setattr(lax, "all_to_all", lambda x, *_, **__: x)
    assert asserts.relative(np.asarray(on_mesh()(X)).reshape(24, 16), X.sum(0)) > 0.5


def test_bfloat16_rounds_the_addends_once():
    """The sum of rounded numbers to the last digits of float32."""
    rounded = np.asarray(X.astype("bfloat16"), np.float32)
    got = np.asarray(on_mesh(dtype="bfloat16")(X)).reshape(24, 16)
    np.testing.assert_allclose(got, rounded.sum(0), rtol=1e-5, atol=1e-6)
    assert asserts.relative(got, X.sum(0)) > 1e-4


def test_one_exchange_sends_the_dtype():
    text = on_mesh(dtype="bfloat16").lower(X).as_text()
    assert re.findall(r"stablehlo.all_to_all.*?-> tensor<(\w+)>", text, re.DOTALL) == ["24x16xbf16"]
