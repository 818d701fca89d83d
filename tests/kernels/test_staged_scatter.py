"""Reduce-scatters in stages over the factors of a mesh axis."""

import re

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.hardware.chips import CHIPS
from shardformer.kernels import gradient_pieces, staged_scatter
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.kernels.staged_scatter import Scattering, choose_scattering
from shardformer.model.model import describe_chip
from tests import asserts, sharded

X = sharded.normal(0, 8, 24, 2)  # one [24, 2] for each place on dp


def on_mesh(stages, dimension=0, exchange=False, sent_as="float32", in_pieces=False):
    def body(x):
        return staged_scatter.scatter_sum(x[0], dimension, Scattering(stages, exchange, in_pieces), "dp", sent_as)[None]

    return sharded.on_mesh(body, (8, 1), (P("dp"),), P("dp"))


@pytest.mark.parametrize("stages", [(), (8,), (2, 4), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("exchange", [False, True])
def test_staged_scatter_leaves_the_slices_of_one_stage(stages, exchange):
    got = on_mesh(stages, exchange=exchange)(X)
    np.testing.assert_allclose(got.reshape(24, 2), X.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("stages", [(2, 4), (4, 2)])
def test_columns_are_scattered_in_stages(stages, exchange):
    columns, step = X.swapaxes(1, 2), on_mesh(stages, 1, exchange)
    np.testing.assert_allclose(np.concatenate(np.asarray(step(columns)), -1), columns.sum(0), rtol=1e-5, atol=1e-6)
    assert found_in(step, columns) == ["reduce_scatter"] * 2


def test_groups_in_another_order_swap_slices(monkeypatch):
    """The twin: the fastest factor first. All sums are there, and lie elsewhere."""
    right = staged_scatter.find_groups
    monkeypatch.setattr(staged_scatter, "find_groups", lambda stages: right(stages)[::-1])
    got = np.asarray(on_mesh((4, 2))(X)).reshape(24, 2)
    assert asserts.relative(got, X.sum(0)) > 0.5
    np.testing.assert_allclose(np.sort(got.ravel()), np.sort(X.sum(0).ravel()), rtol=1e-5, atol=1e-6)


def found_in(step, x):
    return re.findall(r"stablehlo.(all_to_all|reduce_scatter)", step.lower(x).as_text())


def test_an_exchange_is_one_collective():
    assert found_in(on_mesh((2, 2, 2), exchange=True), X) == ["all_to_all"]
    assert found_in(on_mesh((2, 2, 2)), X) == ["reduce_scatter"] * 3


def test_vectors_are_sent_in_float32():
    step = on_mesh((2, 4), exchange=True, sent_as="bfloat16")
    assert found_in(step, X[..., 0]) == ["reduce_scatter"] * 2
    np.testing.assert_allclose(step(X[..., 0]).reshape(24), X[..., 0].sum(0), rtol=1e-5, atol=1e-6)


def test_stages_send_bfloat16():
    """Rounded: the addends, and the sums of the first stage."""
    values = np.abs(X) + 1
    got = np.asarray(on_mesh((2, 4), sent_as="bfloat16")(values)).reshape(24, 2)
    assert 1e-5 < np.abs(got / values.sum(0) - 1).max() < 10 * 2**-9


@pytest.mark.parametrize(("exchange", "sent"), [(True, ["all_to_all"]), (False, ["reduce_scatter"] * 2)])
def test_a_wide_array_is_sent_in_pieces(monkeypatch, exchange, sent):
    monkeypatch.setattr(gradient_pieces, "ELEMENTS", 8 * 256)
    wide = sharded.normal(0, 8, 8, 512)
    assert found_in(on_mesh((2, 4), exchange=exchange), wide) == sent
    step = on_mesh((2, 4), exchange=exchange, in_pieces=True)
    assert found_in(step, wide) == sent * 2
    np.testing.assert_allclose(step(wide).reshape(8, 512), wide.sum(0), rtol=1e-5, atol=1e-6)


V5E = describe_chip("tpu", CHIPS["v5e"])


@pytest.mark.parametrize(
    ("stages", "hardware", "devices", "exchange"),
    [
        ((4, 4), V5E, 16, True),
        ((4, 4), V5E, 32, False),  # libtpu: "Async all-to-all not supported on limited ICI"
        ((4, 4, 4), describe_chip("tpu", CHIPS["v5p"]), 64, True),
        ((8, 8), describe_chip("tpu", CHIPS["v6e"]), 64, False),
        ((4, 4), Hardware("tpu"), 64, True),
        ((4,), CPU, 4, False),
        ((), V5E, 4, False),  # the context is split
    ],
)
def test_short_dimensions_of_a_torus_exchange(stages, hardware, devices, exchange):
    assert choose_scattering(stages, hardware, devices) == Scattering(stages, exchange, hardware.platform == "tpu")
