"""What a whole step sends, against formulas derived by hand: bytes by kind and axis, loops counted with their trips."""

import pytest

from shardformer.analysis import collectives, compiling, traced
from shardformer.parallel import mesh
from tests import shared

# The sizes of `tiny`: layers, width, feed-forward width, padded vocabulary, sequences, tokens.
L, D, F, V, B, T = 2, 32, 128, 64, 8, 16
FLOAT = 4


def layer_bytes(mp: int, block: str) -> int:
    """Of one device: q, k, v, o, up and down are split over mp with up's bias; down's bias and norms are whole."""
    norms = {"parallel": 1, "sequential": 2}[block]
    return L * FLOAT * (4 * D * D // mp + 2 * D * F // mp + F // mp + D + norms * 2 * D)


def other_bytes(mp: int) -> int:
    """The token table, the head and its bias are split over mp; the head's norm is whole."""
    return FLOAT * (2 * V * D // mp + V // mp + 2 * D)


def expected(dp, mp, block="parallel", zero=0, accum=1, sequence_parallel=False) -> dict:
    """{(operation, axis): bytes sent by one device} in one step, scalars left out.

    First as the results' bytes, because those are of known arrays.
    """
    parameters = layer_bytes(mp, block) + other_bytes(mp)
    found = {}
    if mp > 1:
        rows = B // dp  # of a device; cut by accum, and sent as often
        sums = 2 * {"parallel": 1, "sequential": 2}[block] * L + 2  # forward and backward; embedding and head
        of_loss = 4  # a maximum, two sums, an index: one number per token
        if sequence_parallel:
            norms_and_late_bias = {"parallel": 3, "sequential": 5}[block]
            on_own_tokens = FLOAT * D * (L * norms_and_late_bias + 2)  # of the head's norm
            found["all-gather", "mp"] = FLOAT * rows * T * sums * D
            found["reduce-scatter", "mp"] = found["all-gather", "mp"] // mp
            found["all-reduce", "mp"] = FLOAT * rows * T * of_loss + accum * on_own_tokens
        else:
            found["all-reduce", "mp"] = FLOAT * rows * T * (sums * D + of_loss)
    if dp > 1 and zero == 0:
        found["all-reduce", "dp"] = parameters
    if zero == 1:
        found["reduce-scatter", "dp"] = parameters // dp
        found["all-gather", "dp"] = parameters  # when the step begins
    if zero == 3:
        unused_backward = L * FLOAT * D  # down's bias is not needed for any gradient
        found["all-gather", "dp"] = other_bytes(mp) + accum * (2 * layer_bytes(mp, block) - unused_backward)
        found["reduce-scatter", "dp"] = accum * parameters // dp
    return {kind: size * sent_of_result(kind, {"dp": dp, "mp": mp}) for kind, size in found.items()}


def sent_of_result(kind: tuple[str, str], sizes: dict[str, int]) -> float:
    """A ring gathers n - 1 of n parts, or adds them up and scatters them; an all-reduce does both."""
    operation, axis = kind
    n = sizes[axis]
    return {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[operation]


def total(found, config) -> dict:
    arrays = [each for each in found if each.shape]
    return {kind: size for kind, (_, size) in collectives.total_by_kind(arrays, config.mesh_shape).items()}


@pytest.mark.parametrize(
    ("dp", "mp", "options"),
    [(8, 1, {"zero": 1}), (4, 2, {"zero": 3, "accum": 2, "block": "sequential"})],
)
def test_a_compiled_step_sends_what_the_formulas_say(dp, mp, options):
    config = shared.tiny(mesh=f"{dp}x{mp}", **options)
    step = compiling.compile_step(config, mesh.make(config), "cpu")
    assert total(step.collectives, config) == expected(dp, mp, **options)


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
    ],
)
def test_a_traced_step_sends_what_the_formulas_say(dp, mp, options):
    """Nothing is compiled: what `plan` says of any number of chips in seconds."""
    config = shared.tiny(mesh=f"{dp}x{mp}", **options)
    assert total(traced.find_collectives(config), config) == expected(dp, mp, **options)


def test_with_mp_alone_and_that_trips_matter():
    """Without trips, a scan over layers would count as one layer."""
    config = shared.tiny(mesh="1x8")
    found = [each for each in traced.find_collectives(config) if each.shape]
    assert collectives.total_by_kind(found, (1, 8)) == {
        ("all-reduce", "mp"): (2 * L + 2 + 4, expected(1, 8)["all-reduce", "mp"])
    }
    once = [each._replace(count=1) for each in found]
    assert collectives.total_by_kind(once, (1, 8))["all-reduce", "mp"][1] < expected(1, 8)["all-reduce", "mp"]


@pytest.mark.parametrize(("rounds", "exchanging"), [(1, range(5)), (2, (0, 1, 4, 5, 8)), (4, (0, 1, 8, 9, 16))])
def test_a_traced_pipeline_sends_only_in_the_ticks_that_exchange_and_only_to_others(rounds, exchanging):
    """Two stages, four microbatches: `exchanging` are the ticks in which the first stage begins with a microbatch."""
    microbatches, pp, layers, rows = 4, 2, 8, 16
    config = shared.tiny(mesh=f"1x1x{pp}", layers=layers, batch=rows, accum=microbatches, pipeline_rounds=rounds)
    ticks = rounds * microbatches + pp - 1
    onward, backward = ticks, len(exchanging) + 1  # which goes once more around after the last tick
    activations = FLOAT * rows // microbatches * T * D
    own = layer_bytes(1, "parallel") // L * layers // pp
    dealt = own // pp if rounds > 1 else 0  # of two parts of its layers, a stage works on one itself
    expected = 2 * ((onward + backward) * activations + dealt)  # forward, and as much of gradients
    assert total(traced.find_collectives(config), config)["collective-permute", "pp"] == expected
