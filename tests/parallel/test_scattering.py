"""ZeRO's reduce-scatters, in stages and by an exchange, and its all-gathers in stages."""

import re

import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.parallel import scattering
from shardformer.parallel.scattering import Scattering, exchange_scatter
from tests import asserts, sharded
from tests.surroundings import change_pieces

X = sharded.normal(0, 8, 24, 2)  # one [24, 2] for each device along dp


def scatter(stages, dimension=0, exchange=False, sent_as="float32", in_pieces=False, run=sharded.on_mesh):
    def body(x):
        return scattering.scatter_sum(x[0], dimension, Scattering(stages, exchange, in_pieces), "dp", sent_as)[None]

    return run(body, (8, 1), (P("dp"),), P("dp"))


def compile_scatter(stages, **options):
    return scatter(stages, run=sharded.compile_on_mesh, **options)


def total(x):
    """Returns the sum over devices."""
    return x.sum(0, np.float64)


@pytest.mark.parametrize("stages", [(), (8,), (2, 4), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("exchange", [False, True])
def test_staged_scatter_leaves_the_slices_of_one_stage(stages, exchange):
    got = scatter(stages, exchange=exchange)(X)
    assert asserts.relative(got.reshape(24, 2), total(X)) < 1e-15


@pytest.mark.parametrize("exchange", [False, True])
def test_compiled_stages_leave_the_slices_of_one_stage(exchange):
    got = compile_scatter((2, 4), exchange=exchange)(X)
    assert asserts.relative(got.reshape(24, 2), total(X)) < 1e-6


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("stages", [(2, 4), (4, 2)])
def test_columns_are_scattered_in_stages(stages, exchange):
    columns = X.swapaxes(1, 2)
    got = scatter(stages, 1, exchange)(columns)
    assert asserts.relative(np.concatenate(got, -1), total(columns)) < 1e-15
    assert found_in(compile_scatter(stages, dimension=1, exchange=exchange), columns) == ["reduce_scatter"] * 2


def test_groups_in_another_order_swap_slices(broken):
    """The twin: the fastest factor first. All sums are there, and lie elsewhere."""
    right = scattering.find_groups
    broken(scattering, "find_groups", lambda stages: right(stages)[::-1])
    got = scatter((4, 2))(X).reshape(24, 2)
    assert asserts.relative(got, total(X)) > 0.5
    assert asserts.relative(np.sort(got.ravel()), np.sort(total(X).ravel())) < 1e-15


def found_in(step, x):
    return re.findall(r"stablehlo.(all_to_all|reduce_scatter)", step.lower(x).as_text())


def test_an_exchange_is_one_collective():
    assert found_in(compile_scatter((2, 2, 2), exchange=True), X) == ["all_to_all"]
    assert found_in(compile_scatter((2, 2, 2)), X) == ["reduce_scatter"] * 3


def test_vectors_are_sent_in_float32():
    step = compile_scatter((2, 4), exchange=True, sent_as="bfloat16")
    assert found_in(step, X[..., 0]) == ["reduce_scatter"] * 2
    assert asserts.relative(step(X[..., 0]).reshape(24), total(X[..., 0])) < 1e-6


def test_stages_send_bfloat16():
    """Rounded: the addends, and the sums of the first stage."""
    values = np.abs(X) + 1
    got = np.asarray(compile_scatter((2, 4), sent_as="bfloat16")(values)).reshape(24, 2)
    assert 1e-5 < np.abs(got / values.sum(0) - 1).max() < 10 * 2**-9


@pytest.mark.parametrize(("exchange", "sent"), [(True, ["all_to_all"]), (False, ["reduce_scatter"] * 2)])
def test_a_wide_array_is_sent_in_pieces(monkeypatch, exchange, sent):
    change_pieces(monkeypatch, 8 * 256)
    wide = sharded.normal(0, 8, 8, 512)
    assert found_in(compile_scatter((2, 4), exchange=exchange), wide) == sent
    options = {"exchange": exchange, "in_pieces": True}
    assert found_in(compile_scatter((2, 4), **options), wide) == sent * 2
    assert asserts.relative(scatter((2, 4), **options)(wide).reshape(8, 512), total(wide)) < 1e-15

    of_experts = wide.reshape(8, 2, 8, 256)  # a kernel computes it at once
    assert found_in(compile_scatter((2, 4), dimension=1, **options), of_experts) == sent
    parts = np.concatenate(np.split(total(of_experts), 8, 1))
    got = scatter((2, 4), dimension=1, **options)(of_experts)
    assert asserts.relative(got.reshape(16, 1, 256), parts) < 1e-15


# One exchange.

WIDE = sharded.normal(0, 8, 24, 16)  # one [24, 16] for each device along dp


def exchanged(dimension=0, dtype="float32", run=sharded.on_mesh):
    def body(x):
        return exchange_scatter(x[0], "dp", dimension, dtype)[None]

    return run(body, (8, 1), (P("dp"),), P("dp"))


@pytest.mark.parametrize("dimension", [0, 1])
def test_each_device_keeps_the_sum_of_its_slice(dimension):
    got = exchanged(dimension)(WIDE)
    for device, slice_ in enumerate(np.split(total(WIDE), 8, dimension)):
        assert asserts.relative(got[device], slice_) < 1e-15


def test_an_exchange_that_sends_nothing_has_other_sums(broken):
    broken(lax, "all_to_all", lambda x, *_, **__: x)
    assert asserts.relative(exchanged()(WIDE).reshape(24, 16), total(WIDE)) > 0.5


def test_bfloat16_rounds_the_addends_once():
    """The sum of rounded numbers to the last digits of float32."""
    rounded = np.asarray(WIDE.astype("bfloat16"), np.float32)
    got = exchanged(dtype="bfloat16", run=sharded.compile_on_mesh)(WIDE).reshape(24, 16)
    assert asserts.relative(got, total(rounded)) < 1e-6
    assert asserts.relative(got, total(WIDE)) > 1e-4


def test_one_exchange_sends_the_dtype():
    text = exchanged(dtype="bfloat16", run=sharded.compile_on_mesh).lower(WIDE).as_text()
    assert re.findall(r"stablehlo.all_to_all.*?-> tensor<(\w+)>", text, re.DOTALL) == ["24x16xbf16"]


# Gathers.

PARTS = sharded.normal(0, 8, 6, 16)


def gathered(stages, dimension=0, at_once=4, all_reduced=PARTS.nbytes, run=sharded.on_mesh):
    """Returns the function that gathers parts of rows or columns; every device returns the full array."""

    def body(x):
        return scattering.gather_parts(x, dimension, stages, "dp", at_once, all_reduced)[None]

    spec = P("dp") if dimension == 0 else P(None, None, "dp")
    return run(body, (8, 1), (spec,), P("dp"))


@pytest.mark.parametrize("stages", [(), (8,), (2, 4), (2, 2, 2), (1, 2, 2, 2)])
@pytest.mark.parametrize("dimension", [0, 2])
def test_every_device_has_all_parts_in_order(stages, dimension):
    for got in gathered(stages, dimension)(PARTS):
        np.testing.assert_array_equal(got, PARTS)


@pytest.mark.parametrize(
    ("stages", "most", "all_reduced", "found"),
    [
        ((2, 4), 8, PARTS.nbytes, 1),
        ((2, 4), 4, PARTS.nbytes, 2),
        ((2, 4), 4, PARTS.nbytes - 1, 1),  # a large array uses the links of both dimensions
        ((2, 2, 2), 8, PARTS.nbytes, 1),
        ((2, 2, 2), 4, PARTS.nbytes - 1, 2),
    ],
)
def test_parts_of_many_devices_are_gathered_in_stages(stages, most, all_reduced, found):
    step = gathered(stages, at_once=most, all_reduced=all_reduced, run=sharded.compile_on_mesh)
    lowered = step.lower(PARTS)
    assert len(re.findall("stablehlo.all_gather", lowered.as_text())) == found


def test_stages_in_another_order_swap_parts(broken):
    """The twin: the slowest factor first."""
    right = scattering.find_groups
    broken(scattering, "find_groups", lambda stages: right(stages)[::-1])
    assert asserts.relative(gathered((2, 2, 2))(PARTS)[0], PARTS) > 0.5
