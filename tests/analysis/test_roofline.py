"""The roofline of a step against numbers derived by hand."""

import types

import pytest

from shardformer.analysis import memory, plan, roofline, traced
from shardformer.analysis.program_collectives import Collective
from shardformer.config.parsing import parse_mesh
from shardformer.devices import chips
from shardformer.exact import jaxprs
from shardformer.model import flops
from tests import shared

V5E = chips.parse_slice("v5e:1x1")


def predict_times(config, slice_, traffic, sent):
    return roofline.predict_times(plan.resolve_on(config, slice_), slice_, traffic, sent)


def compute(**overrides) -> float:
    """The FLOPs of a token by which a step's arithmetic is timed, on one device of the mesh."""
    config = shared.tiny(**{"mesh": "1x1"} | overrides)
    return predict_times(config, V5E, 0, []).compute * V5E.chip.flops / (config.training.batch * config.model.seq)


def test_a_head_waits_for_no_stage_and_is_not_computed_twice():
    """Each of two stages waits for a third of its three turns with two microbatches.

    Only the residual stream reads o and down, of 32 x 32 and 32 x 128: they are not computed twice either.
    """
    layers = 2 * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32) + 2 * 16 * 32
    head = 32 * 64 + 64 + 2 * 32
    piped = {"mesh": "1x1x2", "accum": 2}
    assert 2 * compute(**piped) == pytest.approx(6 * head + 6 * layers * 3 / 2)
    twice = layers - 2 * (32 * 32 + 32 * 128)
    assert 2 * compute(**piped, remat="full") == pytest.approx(6 * head + (6 * layers + 2 * twice) * 3 / 2)


def test_only_gathers_of_zero_in_a_loop_overlap():
    """A v5e sends 200 GB/s if an exchange takes both dimensions of the torus."""
    config, four = shared.tiny(mesh="4x1"), chips.parse_slice("v5e:2x2")

    def times(operation: str, in_loop: bool):
        sent = Collective(operation, "f32", (10**8,), ((0, 1, 2, 3),), in_loop, 3)
        return predict_times(config, four, 0, [sent])

    seconds = 3 * 3 / 4 * 4e8 / 200e9  # each device sends 3 of 4 parts
    assert times("all-gather", True)[2:4] == pytest.approx((seconds, 0))
    assert times("all-gather", False)[2:4] == pytest.approx((0, seconds))
    assert times("all-reduce", True)[2:4] == pytest.approx((0, 2 * seconds))


@pytest.mark.parametrize(
    ("mesh", "in_loop", "overlaps"),
    [("cp4", True, True), ("1x1x4", True, False)],
)
def test_rings_of_the_context_overlap(mesh, in_loop, overlaps):
    """A v5e sends 200 GB/s if an exchange takes both dimensions of the torus; stages wait for what they receive."""
    config = shared.tiny(mesh=mesh, layers=4, accum=4) if mesh == "1x1x4" else shared.tiny(mesh=mesh)
    sent = Collective("collective-permute", "f32", (10**8,), ((0, 1), (1, 2), (2, 3), (3, 0)), in_loop, 3)
    overlapped, exposed = predict_times(config, chips.parse_slice("v5e:2x2"), 0, [sent])[2:4]
    assert (overlapped > 0, exposed > 0) == (overlaps, not overlaps)
    assert overlapped + exposed == pytest.approx(3 * 4e8 / 200e9)


@pytest.mark.parametrize(
    ("chip", "mesh", "in_loop", "overlaps"),
    [
        ("v5e:2x2", "4x1", True, True),
        ("v5e:2x2", "4x1", False, False),
        ("v5e:4x8", "4x8", True, False),  # libtpu does not exchange beside arithmetic there
        ("h100:4", "4x1", True, False),
    ],
)
def test_scatters_of_layers_are_exchanges_on_a_tpu(chip, mesh, in_loop, overlaps):
    config = shared.tiny(mesh=mesh, zero=3)
    over_dp = tuple(
        tuple(range(place, config.parallel.devices, config.parallel.mp)) for place in range(config.parallel.mp)
    )
    sent = Collective("reduce-scatter", "f32", (10**8,), over_dp, in_loop, 3)
    overlapped, exposed = predict_times(config, chips.parse_slice(chip), 0, [sent])[2:4]
    assert (overlapped > 0, exposed > 0) == (overlaps, not overlaps)


@pytest.mark.parametrize(("block", "fewer"), [("parallel", 2), ("sequential", 1), ("sequential_post_norms", 0)])
def test_full_remat_repeats_no_product_that_no_gradient_reads(block, fewer):
    """The trace of a layer has as many products with its six matrices as the FLOPs say; `linear` has three by chip."""
    config = shared.tiny(mesh="1x1", remat="full", block=block, bias="none", d_ff=33)
    (body,) = traced.trace(plan.resolve_on(config, V5E)).bodies
    products = [
        {size for atom in (*equation.invars, *equation.outvars) for size in atom.aval.shape}
        for inner in jaxprs.walk(body)
        for equation in inner.eqns
        if equation.primitive.name == "dot_general"
    ]
    assert sum(33 in sizes for sizes in products) == 2 * (1 + 1 + 4) - (fewer > 0)
    down, o = 2 * 32 * 33 * config.model.layers, 2 * 32 * 32 * config.model.layers
    assert roofline.unread_flops_per_token(config) == [0, down, down + o][fewer]


def test_narrow_heads_leave_a_part_of_a_matrix_unit_idle():
    """Heads of 128 numbers fill half of the rows of a v6e's unit, and all of a v5e's."""
    seconds = {}
    for chip in ("v5e", "v6e"):
        slice_ = chips.parse_slice(f"{chip}:1x1")
        config = shared.tiny(mesh="1x1", d_model=256, heads=2)
        times = roofline.Roofline(1.0, 0, 0, 0)
        seconds[chip] = (roofline.forecast_seconds(times, config, slice_) - 1 / 0.93) * slice_.chip.flops
    one_pass = 16 * 8 * flops.attention_flops(shared.tiny(mesh="1x1", d_model=256, heads=2))
    assert seconds["v6e"] - seconds["v5e"] == pytest.approx(3.5 * one_pass / 0.5, rel=1e-3)


def test_attention_waits_for_stages_as_products_do():
    """Two stages and two microbatches take three turns: half as long again. A fixed time of all arithmetic cancels."""
    seconds = {}
    for mesh in ("1x1x2", "2x1"):
        config = shared.tiny(mesh=mesh, accum=2)
        seconds[mesh] = roofline.forecast_seconds(roofline.Roofline(1.0, 0, 0, 0), config, V5E) - 1 / 0.93
    assert seconds["1x1x2"] == pytest.approx(1.5 * seconds["2x1"])


def test_exposed_wire_traffic_adds_to_the_longest_time():
    times = roofline.Roofline(compute=3.0, memory=2.0, overlapped_wire=5.0, exposed_wire=1.0)
    assert times.seconds == 6.0
    assert times.binding == "overlapped wire"


def test_host_link_adds_the_bytes_of_one_direction():
    """Moments of the matrices of one device: 8 bytes a parameter come and go at once."""
    config = shared.tiny(mesh="1x1", offload="optimizer")
    hosted, link = memory.predict_bytes(config).host, V5E.chip.host_link
    planned = plan.estimate(config, V5E).times
    assert planned.host_link == pytest.approx(hosted / link)
    assert planned.seconds == pytest.approx(planned._replace(host_link=0).seconds + hosted / link)
    assert roofline.predict_times(plan.resolve_on(config, V5E), V5E, 0, []).host_link == 0


def test_frozen_weights_take_two_thirds_of_the_flops():
    """With adapters, the forward pass that remat=full repeats is near a half of a step and no third."""
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32)
    head = 32 * 64 + 64 + 2 * 32  # once, whatever the layers do
    attention = 2 * 16 * 32
    adapters = 2 * 4 * (32 + 32)
    assert compute() == pytest.approx(6 * head + 6 * matrices + 6 * attention)
    unread = 2 * 2 * (32 * 32 + 32 * 128)  # o and down, whose products no gradient reads
    assert compute(remat="full") == pytest.approx(6 * head + 8 * matrices - unread + 8 * attention)
    lora = {"lora_rank": 4, "lora_targets": "q"}
    assert compute(**lora) == pytest.approx(4 * head + 4 * matrices + 6 * adapters + 6 * attention)
    expected = 4 * head + 6 * matrices - unread + 8 * adapters + 8 * attention
    assert compute(**lora, remat="full") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "mesh", "gigabytes"),
    [
        (8, "4x2", {"dp": 450, "mp": 450, "dp mp": 450}),
        (64, "8x8", {"dp": 50, "mp": 450, "dp mp": 400}),
        (64, "16x4", {"dp": 100, "mp": 450}),
        (64, "4x8x2", {"dp": 50, "pp": 50, "mp": 450}),
        (64, "8x2x4", {"dp": 50, "pp": 450, "mp": 450, "mp pp": 450, "dp pp": 200}),
        (64, "4x16", {"mp": 400}),
        (6, "2x3", {"mp": 450}),
        (12, "4x3", {"mp": 50}),  # GPUs 6, 7 and 8 are on two hosts
        (512, "512x1", {"dp": 400}),
        (64, "dp4.cp4.mp4", {"dp": 50, "cp": 100, "mp": 450, "mp cp": 400}),
    ],
)
def test_exchange_beyond_a_gpu_host_takes_the_network(count, mesh, gigabytes):
    """50 GB/s for each of its members on a host, up to the 450 of its switch; mp lies innermost, then cp, pp and dp."""
    config = types.SimpleNamespace(
        parallel=types.SimpleNamespace(mesh_shape=tuple(parse_mesh(mesh)))
    )  # of more devices than a batch has rows
    h100 = chips.parse_slice(f"h100:{count}")
    assert {axes: roofline.axis_bandwidth(axes, config, h100) / 1e9 for axes in gigabytes} == gigabytes


def test_a_torus_has_no_hosts():
    config = shared.tiny(mesh="8x8", batch=64)
    assert roofline.axis_bandwidth("dp", config, chips.parse_slice("v5e:8x8")) == 100e9
