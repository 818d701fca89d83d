"""The reader of compiled HLO, on text in every form that XLA prints."""

import pytest

from shardformer.analysis import hlo, program_collectives
from shardformer.analysis.program_collectives import Collective

MP_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
DP_FOURS = ((0, 2, 4, 6), (1, 3, 5, 7))
PLAIN = "%ar = f32[2,12]{1,0} all-reduce(%x), channel_id=1, replica_groups="


def one(line):
    (found,) = program_collectives.parse_collectives(line)
    return found


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", MP_PAIRS),
        ("{{0,2,4,6},{1,3,5,7}}", DP_FOURS),
        ("[4,2]<=[8]", MP_PAIRS),
        ("[2,4]<=[4,2]T(1,0)", DP_FOURS),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("mesh['dp'=4,'mp'=2] {'mp'}", MP_PAIRS),
        ("mesh['dp'=4,'mp'=2] {'dp'}", DP_FOURS),
        ("mesh['dp'=4,'mp'=2] {'dp','mp'}", (tuple(range(8)),)),
        ("mesh['dp'=4,'mp'=2] {'mp','dp'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['axis_0'=1,'axis_1'=1,'axis_2'=2,'axis_3'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", MP_PAIRS),
    ],
)
def test_replica_groups(groups, expected):
    found = one(PLAIN + groups + ", use_global_device_ids=true, to_apply=%sum")
    assert found == Collective("all-reduce", "f32", (2, 12), expected, in_loop=False)


@pytest.mark.parametrize("groups", ["mesh['a'=8] {'a':(1)2}", "{}", "something new"])
def test_unknown_replica_groups_raise(groups):
    with pytest.raises(ValueError, match="replica groups"):
        program_collectives.parse_collectives(PLAIN + groups + ", to_apply=%sum")


@pytest.mark.parametrize(
    ("counts", "axes", "devices"),
    [
        ("num_partitions=8", "dp mp", 8),
        ("replica_count=2, num_partitions=4", "dp mp", 8),
        ("entry_computation_layout={()->f32[]}", "", 1),
    ],
)
def test_empty_groups_are_all_devices(counts, axes, devices):
    program = (
        f"HloModule jit_step, is_scheduled=true, {counts}\n\nENTRY %main () -> f32[2,12] {{\n  {PLAIN}{{}}, a=1\n}}\n"
    )
    found = one(program)
    assert found.groups == (tuple(range(devices)),)
    assert found.over((4, 2) if devices == 8 else (1, 1)) == axes


def test_axes_of_the_mesh():
    def over(groups, shape):
        return one(PLAIN + groups).over(shape)

    assert over("{{0,1},{2,3},{4,5},{6,7}}", (4, 2)) == "mp"
    assert over("{{0,1},{2,3},{4,5},{6,7}}", (8, 1)) == "dp"
    assert over("{{0,2,4,6},{1,3,5,7}}", (4, 2)) == "dp"
    assert over("{{0,1,2,3,4,5,6,7}}", (4, 2)) == "dp mp"
    assert over("{{0},{1}}", (2, 1)) == ""


def test_a_merged_operation_counts_for_each_of_its_tensors():
    found = program_collectives.parse_collectives(
        "%ar = (f32[3,16]{1,0}, bf16[8]{0}, /*index=2*/pred[], s32[2,2]{1,0:T(2,128)}) "
        "all-reduce(%a, %b, %c, %d), channel_id=1, replica_groups={{0,1}}, to_apply=%sum"
    )
    assert [(c.dtype, c.shape, c.bytes) for c in found] == [
        ("f32", (3, 16), 192),
        ("bf16", (8,), 16),
        ("pred", (), 1),
        ("s32", (2, 2), 16),
    ]


@pytest.mark.parametrize(
    ("line", "operation", "shapes"),
    [
        ("%s = f32[4]{0} all-reduce-start(%x), replica_groups={{0,1}}", "all-reduce", [(4,)]),
        ("%s = (f32[4]{0}, f32[2]{0}) all-reduce-start(%x, %y), replica_groups={{0,1}}", "all-reduce", [(4,), (2,)]),
        ("%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1}}", "all-gather", [(8,)]),
        (
            "%s = ((f32[4,1]{1,0}, bf16[2]), (f32[8,1]{1,0}, bf16[4])) all-gather-start(%x, %y), "
            "replica_groups={{0,1}}", "all-gather", [(8, 1), (4,)],
        ),
        (
            "%s = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}", "collective-permute", [(4,)],
        ),
        ("%s = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1}}, dimensions={0}", "reduce-scatter", [(2,)]),
        ("%s = f32[2]{0} all-to-all(%x), replica_groups={{0,1}}, dimensions={0}", "all-to-all", [(2,)]),
    ],
)  # fmt: skip
def test_result_shape_of_each_operation(line, operation, shapes):
    found = program_collectives.parse_collectives(line)
    assert [c.operation for c in found] == [operation] * len(shapes)
    assert [c.shape for c in found] == shapes


def test_mention_of_a_collective_is_not_counted():
    text = """
  %done = f32[4]{0} all-reduce-done(%s)
  %gte = f32[4]{0} get-tuple-element(%all-reduce.3), index=0
  %add = f32[4]{0} add(%all-reduce, %all-gather), metadata={op_name="all-reduce(x)"}
"""
    assert program_collectives.parse_collectives(text) == []


def test_the_body_of_a_loop():
    text = """
HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %inner = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
  ROOT %t = (s32[], f32[4]) tuple(%i, %inner)
}

%condition.1 (p: (s32[], f32[4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.9 (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%init), condition=%condition.1, body=%body.1
  ROOT %outer = f32[8]{0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%sum
}
"""
    assert {(c.shape, c.in_loop) for c in program_collectives.parse_collectives(text)} == {((4,), True), ((8,), False)}


NESTED = """
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%gathering (p: f32[4]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[4] {
  %sum = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %mine = f32[4]{0} dynamic-slice(%sum, %at), dynamic_slice_sizes={4}
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[4]) tuple(%i, %a)
}

%less (p: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %w = (s32[], f32[4]) while(%p), condition=%less, body=%inner
  %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%gathering
  ROOT %t = (s32[], f32[4]) tuple(%i, %a)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%init), condition=%less, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %s = f32[4]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %c = f32[8]{0} call(%x), to_apply=%gathering
}
"""


def test_calls_fusions_and_nested_loops_are_followed():
    found = {(c.operation, c.shape, c.in_loop): c.times for c in program_collectives.parse_collectives(NESTED)}
    assert found == {
        ("all-reduce", (4,), True): 15,  # 5 known trips times 3 of the condition's constant
        ("all-gather", (8,), True): 5,
        ("all-gather", (8,), False): 1,
        ("reduce-scatter", (4,), False): 1,  # how a TPU's compiler writes it
    }


def test_totals_sum_bytes_by_operation_and_axis():
    found = program_collectives.parse_collectives(NESTED)
    assert program_collectives.total_by_kind(found, (2, 1)) == {
        ("all-reduce", "dp"): (15, 15 * 16),
        ("all-gather", "dp"): (6, 6 * 16),  # the other half of the result comes from the other device
        ("reduce-scatter", "dp"): (1, 16),
    }


EIGHT = "{{0,1,2,3,4,5,6,7}}, to_apply=%sum"


def test_ring_bytes_of_each_operation():
    reduced = one(PLAIN + EIGHT)
    assert program_collectives.wire_bytes(reduced) == 2 * 7 / 8 * reduced.bytes
    gathered = one(PLAIN.replace("all-reduce", "all-gather") + EIGHT)
    assert program_collectives.wire_bytes(gathered) == 7 / 8 * gathered.bytes
    scattered = one(PLAIN.replace("all-reduce", "reduce-scatter") + EIGHT)
    assert program_collectives.wire_bytes(scattered) == 7 * scattered.bytes


def test_gather_and_scatter_of_an_array_send_equal_bytes():
    gathered = Collective("all-gather", "f32", (64,), (tuple(range(8)),), False)
    found = [gathered, Collective("reduce-scatter", "f32", (8,), gathered.groups, False)]
    totals = program_collectives.total_by_kind(found, (8, 1))
    assert totals["all-gather", "dp"] == totals["reduce-scatter", "dp"] == (1, 7 / 8 * 64 * 4)


IN_FLIGHT = """
%fused_computation.1 (p: f32[4]) -> f32[8] {
  ROOT %start = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

%async_collective_fusion.2 (p: f32[4]) -> f32[8] {
  ROOT %going_on = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %async-collective-start = f32[8]{0} fusion(%x), kind=kCustom, calls=%fused_computation.1
  %product = f32[8]{0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.2
  %async-collective-done = f32[8]{0} fusion(%x), kind=kCustom, calls=%fused_computation.1
}
"""


def test_asynchronous_collective_counts_once():
    """A TPU's compiler writes it into every fusion that it accompanies."""
    assert [c.times for c in program_collectives.parse_collectives(IN_FLIGHT)] == [1]


CYCLES = """
%part (p: f32[4]) -> f32[4] {
  ROOT %inner = f32[4]{0} add(%p, %p), backend_config={"estimated_cycles":"7"}
}

%triangle (p: f32[4]) -> f32[4] {
  %a = f32[4]{0} fusion(%p), calls=%part, backend_config={"estimated_cycles":"10"}
}

%rows (p: f32[4]) -> f32[4] {
  %b = f32[4]{0} fusion(%p), calls=%part, backend_config={"estimated_cycles":"100"}
  %w = f32[4] while(%p), condition=%c, body=%triangle, metadata={op_name="layers/attention/layers/while/body/while"}
}

%c (p: f32[4]) -> pred[] {
}

%n (p: f32[4]) -> pred[] {
  %k = s32[] constant(16)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %d = f32[4]{0} fusion(%x), calls=%part, backend_config={"estimated_cycles":"1000"}
  %unknown = f32[4]{0} fusion(%x), calls=%part, backend_config={"estimated_cycles":"1000000000000000000"}
  %v = f32[4] while(%x), condition=%n, body=%rows, metadata={op_name="layers/attention/layers/while"}
}
"""


def test_cycles_are_multiplied_by_loop_trips():
    """Blockwise attention visits half of the square of blocks, and its diagonal."""
    assert hlo.estimate_cycles(CYCLES) == 1000 + 16 * (100 + 10 * (16 + 1) / 2)
