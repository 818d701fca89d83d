"""The collectives of a full step against formulas derived by hand: bytes by kind and axis, with the trips of loops."""

import pytest

from shardformer.analysis import compiling, program_collectives, traced
from shardformer.layout import mesh, resolve
from tests import shared, wire


def total(found, config) -> dict:
    arrays = [each for each in found if each.shape not in ((), (3,))]
    return {
        kind: size for kind, (_, size) in program_collectives.total_by_kind(arrays, config.parallel.mesh_shape).items()
    }


@pytest.mark.slow
def test_a_compiled_step_sends_what_the_formulas_say():
    config = shared.tiny(mesh="4x2", zero=3, accum=2, block="sequential")
    step = compiling.compile_step(config, mesh.make(config), "cpu")
    assert total(step.collectives, config) == wire.expected_bytes(config)
    assert sum(c.shape in ((), (3,)) for c in step.collectives) == 3
    assert all(c.over(config.parallel.mesh_shape) for c in step.collectives)  # no group of one device


@pytest.mark.parametrize(
    ("dp", "mp", "options"),
    [
        (8, 1, {}),
        (4, 2, {}),
        (2, 4, {"block": "sequential"}),
        (8, 1, {"zero": 1}),
        (4, 2, {"zero": 1, "accum": 2}),
        (2, 4, {"zero": 3}),
        (4, 2, {"zero": 3, "accum": 2, "block": "sequential"}),
        (2, 4, {"block": "sequential", "sequence_parallel": True}),
        (4, 2, {"zero": 1, "accum": 2, "sequence_parallel": True}),
        (4, 2, {"zero": 3, "accum": 2, "sequence_parallel": True}),
        (2, 4, {"remat": "dots", "block": "sequential", "sequence_parallel": True}),
    ],
)
def test_a_traced_step_sends_what_the_formulas_say(dp, mp, options):
    """Nothing is compiled: what `plan` says of any number of chips in seconds."""
    config = shared.tiny(mesh=f"{dp}x{mp}", **options)
    assert total(traced.find_collectives(resolve(config)), config) == wire.expected_bytes(config)


SPLIT_CONTEXTS = (
    ("dp2.cp4", {"context_parallel": "ring", "zero": 1}),
    ("dp2.cp2.mp2", {"context_parallel": "gather", "zero": 1, "sequence_parallel": True}),
    ("dp2.cp2.mp2", {"context_parallel": "gather", "zero": 3, "sequence_parallel": True}),
)


@pytest.mark.parametrize(("name", "options"), SPLIT_CONTEXTS)
def test_a_split_context_sends_what_the_formulas_say(name, options):
    config = shared.tiny(mesh=name, **options)
    assert total(traced.find_collectives(resolve(config)), config) == wire.expected_bytes(config)


@pytest.mark.slow
def test_a_compiled_ring_sends_what_the_formulas_say():
    name, options = SPLIT_CONTEXTS[0]
    config = shared.tiny(mesh=name, **options)
    step = compiling.compile_step(config, mesh.make(config), "cpu")
    assert total(step.collectives, config) == wire.expected_bytes(config)


def test_formulas_need_the_trips_of_loops():
    """Without trips, a scan over layers would count as one layer."""
    config = shared.tiny(mesh="1x8")
    expected = wire.expected_bytes(config)["all-reduce", "mp"]
    found = [each for each in traced.find_collectives(resolve(config)) if each.shape not in ((), (3,))]
    assert program_collectives.total_by_kind(found, (1, 8)) == {
        ("all-reduce", "mp"): (wire.count_activation_sums(config) + wire.LOSS_SUMS, expected)
    }
    once = [each._replace(times=1) for each in found]
    assert program_collectives.total_by_kind(once, (1, 8))["all-reduce", "mp"][1] < expected


@pytest.mark.parametrize(("rounds", "exchanging"), [(1, range(5)), (2, (0, 1, 4, 5, 8)), (4, (0, 1, 8, 9, 16))])
def test_traced_pipeline_sends_only_in_exchange_ticks(rounds, exchanging):
    """Two stages, four microbatches: `exchanging` are the ticks in which the first stage begins with a microbatch."""
    microbatches, pp, layers, rows = 4, 2, 8, 16
    config = shared.tiny(mesh=f"1x1x{pp}", layers=layers, batch=rows, accum=microbatches, pipeline_rounds=rounds)
    ticks = rounds * microbatches + pp - 1
    onward, backward = ticks, len(exchanging) + 1  # which goes once more around after the last tick
    activations = wire.FLOAT * rows // microbatches * config.model.seq * config.model.d_model
    own = wire.layer_bytes(config) // pp
    dealt = own // pp if rounds > 1 else 0  # of two parts of its layers, a stage works on one itself
    expected = 2 * ((onward + backward) * activations + dealt)  # forward, and as much of gradients
    assert total(traced.find_collectives(resolve(config)), config)["collective-permute", "pp"] == expected


EXPERTS = {
    "mesh": "2x2", "experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 32, "layers": 2, "shared_width": 8,
    "balance_loss": 0.1, "batch": 8,
}  # fmt: skip


@pytest.mark.parametrize("axes", ["mp", "dp"])
def test_traced_experts_send_what_the_formulas_say(axes):
    config = shared.tiny(**EXPERTS, expert_axes=axes)
    assert total(traced.find_collectives(resolve(config)), config) == wire.expected_expert_bytes(config)


@pytest.mark.slow
def test_compiled_experts_send_what_the_formulas_say():
    config = shared.tiny(**EXPERTS, expert_axes="dp")
    step = compiling.compile_step(config, mesh.make(config), "cpu")
    assert total(step.collectives, config) == wire.expected_expert_bytes(config)
