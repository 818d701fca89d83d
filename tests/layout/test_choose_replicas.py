"""The choice of data parallelism, from configurations and devices that need not exist."""

import pytest

from shardformer.devices.chips import CHIPS, CPU, Hardware, describe_chip
from shardformer.layout import resolve
from shardformer.layout.choose_replicas import choose_scattering
from shardformer.parallel.replicas import Replicated, Zero1, Zero3
from shardformer.parallel.scattering import Scattering
from tests import shared

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


@pytest.mark.parametrize(
    ("changes", "replicas", "reason"),
    [
        ({"mesh": "1x1", "zero": 3}, Replicated(), "one replica"),
        ({"mesh": "1x4", "zero": 1}, Replicated(), "one replica"),
        ({"mesh": "4x2"}, Replicated(("dp",), ("dp",), 4), "zero=0"),
        ({"mesh": "2x1x2", "accum": 2}, Replicated(("dp",), ("dp", "pp"), 4), "zero=0"),
        ({"mesh": "dp2.cp2.mp2"}, Replicated(("dp", "cp"), ("dp", "cp"), 4), "zero=0"),
        ({"mesh": "4x2", "zero": 1}, Zero1(("dp",), ("dp",), 4), "zero=1, gradients reduce-scattered in one stage"),
        ({"mesh": "4x2", "zero": 3}, Zero3(("dp",), ("dp",), 4), "zero=3, gradients reduce-scattered in one stage"),
    ],
)
def test_replicas_follow_the_mesh_and_zero(changes, replicas, reason):
    layout = resolve(shared.tiny(**{"dtype": "float32"} | changes))
    assert (layout.replicas, layout.reasons["replicas"]) == (replicas, reason)


@pytest.mark.parametrize(
    ("torus", "hardware", "reason"),
    [
        (
            (2, 2),
            V5E,
            "zero=3, gradients of rows of layers exchanged, as the torus is short; others reduce-scattered",
        ),
        ((2, 2), CPU, "zero=3, gradients reduce-scattered in 2 stages, one for each dimension of the torus"),
    ],
)
def test_scattering_has_a_reason(torus, hardware, reason):
    assert resolve(shared.tiny(mesh="4x1", zero=3), hardware, torus).reasons["replicas"] == reason


def test_zero1_is_not_zero3():
    """The negative twin: equal fields of another class are other replicas."""
    assert Zero1(("dp",), ("dp",), 4) != Zero3(("dp",), ("dp",), 4)
