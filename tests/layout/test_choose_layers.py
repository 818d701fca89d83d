"""The choice to scan or to unroll the layers, by the device."""

import pytest

from shardformer.devices.chips import CPU, Hardware
from shardformer.layout import resolve
from tests import shared

GPU, TPU = Hardware("gpu", 9.0), Hardware("tpu")


@pytest.mark.parametrize(
    ("hardware", "changes", "scan", "reason"),
    [
        (CPU, {}, True, "costs little on cpu"),
        (TPU, {}, True, "costs little on tpu"),
        (GPU, {}, False, "a GPU copies each layer's arrays"),
        (GPU, {"layers": 65}, True, "more than 64 layers compile for long"),
        (GPU, {"layers": 64}, False, "a GPU copies"),
        (GPU, {"mesh": "2x1", "zero": 3}, True, "holds the gathered parameters of one layer"),
        (GPU, {"mesh": "1x1x2", "accum": 2}, True, "a scan for each stage"),
        (GPU, {"scan": True}, True, "scan=true"),
        (CPU, {"scan": False}, False, "scan=false"),
    ],
    ids=str,
)
def test_scan_is_chosen_by_the_device(hardware, changes, scan, reason):
    layout = resolve(shared.tiny(**{"mesh": "1x1"} | changes), hardware)
    assert layout.loop.scan is scan
    assert reason in layout.reasons["loop"]
