"""A step's time by a TPU program's schedule: by hand, of programs of a few lines."""

import numpy as np
import pytest

from shardformer.analysis import wire_time
from shardformer.devices import chips
from shardformer.model import flops
from tests import shared

SLICE = chips.parse_slice("v5e:2x2")
PLACES = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])
CYCLES = round(SLICE.chip.clock / 1000)  # a millisecond
LINK = SLICE.chip.wire / 4  # bytes per second of one link, one way
FLOATS = round(LINK / 1000 / 4)  # a millisecond on one link
CONFIG = shared.tiny(mesh="4x1")

MODULE = """HloModule step, is_scheduled=true, num_partitions=4

%all-reduce-scatter.1 (p: f32[8]) -> f32[8] {{
  %ar.1 = f32[{floats}] all-reduce(%p), replica_groups={{{{0,2}},{{1,3}}}}, to_apply=%add
}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
{send}
{inside}
  %send = f32[{floats}] collective-permute-done(%collective-permute-start.7)
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %limit = s32[] constant(5)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
{entry}
}}
"""
SEND = (  # a number, and pairs of sender and receiver
    "  %collective-permute-start.{} = (f32[{floats}], f32[{floats}]) collective-permute-start(%p), "
    "source_target_pairs={{{}}}".replace("{floats}", str(FLOATS))
)
DONE = "  %done = f32[8] collective-permute-done(%collective-permute-start.8)"
PRODUCT = f'  %dot.1 = f32[8] fusion(%p), calls=%fused, backend_config={{"estimated_cycles":"{CYCLES}"}}'
LOOP = "  %loop = (s32[], f32[8]) while(%init), condition=%condition, body=%body"
SCATTER = "  %scatter = f32[8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"


def timeline(entry, inside=""):
    send = SEND.format(7, "{0,1},{2,3}")
    text = MODULE.format(entry=entry, inside=inside, send=send, floats=FLOATS)
    found = wire_time.time_step(text, PLACES, CONFIG, SLICE)
    return [round(1000 * seconds, 2) for seconds in (found.computing, found.exposed, found.wire)]


def test_product_takes_its_cycles():
    assert timeline(PRODUCT) == [1, 0, 0]


def test_synchronous_scatter_is_exposed():
    """Half of the bytes, over both directions of a dimension: a quarter of a millisecond."""
    assert timeline(f"{PRODUCT}\n{SCATTER}") == [1, 0.25, 0.25]


def test_longest_branch_of_a_conditional_counts():
    choice = "  %x = f32[8] conditional(%p, %a, %b), branch_computations={%body, %other}"
    entry = f"{PRODUCT}\n{choice}"
    assert timeline(entry, PRODUCT) == [2, 0, 1]
    two = choice.replace("branch_computations={%body, %other}", "true_computation=%other, false_computation=%body")
    assert timeline(f"{PRODUCT}\n{two}", PRODUCT) == [2, 0, 1]


def test_send_hides_behind_a_product_in_each_turn():
    assert timeline(LOOP, PRODUCT) == [5, 0, 5]


def test_send_without_a_product_is_exposed_in_each_turn():
    """The twin: nothing between start and done."""
    assert timeline(LOOP) == [0, 5, 5]


@pytest.mark.parametrize(("pairs", "exposed"), [("{0,1},{2,3}", 1), ("{1,0},{3,2}", 0), ("{0,2},{1,3}", 0)])
def test_sends_wait_for_links_that_others_use(pairs, exposed):
    """A second send beside the first: over the same links, the other way, and in the other dimension."""
    sends = [SEND.format(7, "{0,1},{2,3}"), SEND.format(8, pairs)]
    assert timeline("\n".join([*sends, PRODUCT, DONE])) == [1, exposed, 2]


def test_gather_begins_and_ends_as_fusions():
    """A fusion between the two names the gather again, which is not sent again."""
    gather = f"  %gather = f32[{FLOATS}] all-gather(%p), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}"
    fusions = "\n".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n{gather}\n}}" for name in ("fused", "async_collective_fusion")
    )
    start = "  %async-collective-start.3 = (f32[8], u32[]) fusion(%p), calls=%fused"
    middle = PRODUCT.replace("%fused", "%async_collective_fusion")
    entry = f"{start}\n{middle}\n  %async-collective-done.3 = f32[8] fusion(%x), calls=%fused"
    text = MODULE.format(entry=entry, inside="", send="", floats=FLOATS).replace("ENTRY", f"{fusions}\n\nENTRY")
    found = wire_time.time_step(text, PLACES, CONFIG, SLICE)
    assert (found.exposed, round(1000 * found.wire, 2)) == (0, 0.25)


REMATTED = ', metadata={op_name="jit(step)/checkpoint/rematted_computation/all_gather"}'


@pytest.mark.parametrize("metadata", ["", REMATTED])
def test_gather_of_a_recomputed_layer_is_sent_too(metadata):
    """The name of an operation says where it came from, and is no name of a computation."""
    gather = f"  %gather = f32[{FLOATS}] all-gather(%p), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}{metadata}"
    entry = "  %async-collective-start.3 = (f32[8], u32[]) fusion(%p), calls=%fused"
    text = MODULE.format(entry=entry, inside="", send="", floats=FLOATS)
    text = text.replace("ENTRY", f"%fused (p: f32[8]) -> f32[8] {{\n{gather}\n}}\n\nENTRY")
    assert round(1000 * wire_time.time_step(text, PLACES, CONFIG, SLICE).wire, 2) == 0.25


@pytest.mark.parametrize(
    ("chip", "places", "milliseconds"),
    [
        ("v5e:2x2", [(0, 0), (0, 1), (1, 0), (1, 1)], 0.25),  # half a link, of two in a dimension
        ("v5e:4x4", [(i, 0) for i in range(4)], 0.5),  # 0, 1, 2 and 1 links
        ("v5e:4x4", [(i, j) for i in range(4) for j in range(4)], 0.5),
        ("v5e:8x8", [(i, 0) for i in range(8)], 1.0),
    ],
)
def test_parts_of_an_exchange_cross_several_links(chip, places, milliseconds):
    """The mean distance in the longest dimension: every device sends a part to each device."""
    text = (
        f"HloModule step, is_scheduled=true, num_partitions={len(places)}\n\n"
        f"ENTRY %main (p: f32[8]) -> f32[8] {{\n"
        f"  %all-to-all-start = ((f32[{FLOATS}]), f32[{FLOATS}], u32[], u32[]) all-to-all-start(%p), "
        f"replica_groups={{{{{','.join(map(str, range(len(places))))}}}}}, dimensions={{0}}\n"
        f"{PRODUCT}\n"
        f"  %all-to-all-done = f32[{FLOATS}] all-to-all-done(%all-to-all-start)\n}}\n"
    )
    found = wire_time.time_step(text, np.array(places), CONFIG, chips.parse_slice(chip))
    assert round(1000 * found.wire, 2) == milliseconds
    assert found.exposed == pytest.approx(max(milliseconds / 1000 - found.computing, 0))


def test_utilization_is_the_share_of_the_peak():
    """6 FLOPs for each multiplying parameter, and the causal half of attention, of what four chips do in 1 ms."""
    c, tokens = CONFIG, CONFIG.training.batch * CONFIG.model.seq
    vectors = (
        c.model.layers * (4 * c.model.d_model + c.model.d_model + 2 * c.model.d_model)
        + c.model.padded_vocab
        + 2 * c.model.d_model
    )
    matrices = c.model.layers * 12 * c.model.d_model**2 + c.model.d_model * c.model.padded_vocab
    needed = tokens * (6 * (matrices + vectors) + 6 * c.model.layers * c.model.seq * c.model.d_model)
    got = wire_time.utilization(wire_time.Timeline(0.5e-3, 0, 0.5e-3, 0), CONFIG, SLICE)
    assert got == pytest.approx(needed / (4 * SLICE.chip.flops * 1e-3))


GROUPED_CALL = "  %gmm.{} = bf16[8] custom-call(%p)"
SPLASH_CALL = "  %splash_mha_fwd.{} = bf16[8] custom-call(%p)"


def time_experts(*lines):
    config = shared.tiny(mesh="4x1", bias="none", experts=4)
    text = MODULE.format(entry="\n".join(lines), inside="", send="", floats=FLOATS)
    return wire_time.time_step(text, PLACES, config, SLICE), config


def test_calls_of_a_kernel_share_its_flops():
    """However many calls there are: those of the experts at one share of the peak, those of attention at another."""
    one, config = time_experts(GROUPED_CALL.format(1))
    tokens = config.training.batch * config.model.seq / 4
    grouped = flops.expert_flops_per_token(config)[0] * tokens / (wire_time.GROUPED_SHARE * SLICE.chip.flops)
    assert one == (0, pytest.approx(grouped), 0, 0)
    three, _ = time_experts(*map(GROUPED_CALL.format, (1, 2, 3)))
    assert three.kernels == pytest.approx(grouped)
    both, _ = time_experts(GROUPED_CALL.format(1), SPLASH_CALL.format(1), SPLASH_CALL.format(2))
    attention = wire_time.KERNEL_PASSES * flops.attention_flops(config) * tokens
    assert both.kernels - grouped == pytest.approx(attention / (wire_time.KERNEL_SHARE * SLICE.chip.flops))
    reader, _ = time_experts("  %x = bf16[8] fusion(%gmm.1), calls=%fused")
    assert reader.kernels == 0


def test_transfer_hides_behind_a_kernel():
    """The twin is the kernel before the transfer starts."""
    start, done = SEND.format(8, "{0,1},{2,3}"), DONE
    kernel = GROUPED_CALL.format(1)
    hidden, _ = time_experts(start, kernel, done)
    exposed, _ = time_experts(kernel, start, done)
    assert hidden.exposed == pytest.approx(exposed.exposed - min(hidden.kernels, exposed.exposed))
    assert hidden.kernels > 0
    assert exposed.exposed == pytest.approx(1e-3, rel=1e-3)
