"""A resumed run on other devices."""

import pytest

from shardformer.config import Config
from shardformer.layout.other_devices import adapt_to_devices
from shardformer.tables import format_count
from tests import shared


def test_a_resumed_mesh_keeps_its_cp():
    config = shared.tiny(mesh="dp4.cp2.mp1")
    assert adapt_to_devices(config, 4, True).parallel.mesh == "dp2.cp2.mp1"
    assert adapt_to_devices(config, 6, True).parallel.mesh == "auto"  # dp=3 does not divide the batch


@pytest.mark.parametrize(
    ("mesh_before", "batch", "devices", "all_of_them", "expected"),
    [
        ("8x1", 16, 8, True, "8x1"),
        ("8x1", 16, 4, True, "4x1"),
        ("8x1", 16, 16, True, "16x1"),
        ("8x1", 16, 16, False, "8x1"),  # one process may leave devices unused
        ("4x2", 8, 16, True, "8x2"),  # mp stays
        ("4x2", 8, 4, True, "2x2"),
        ("2x4", 8, 2, True, "auto"),  # mp=4 has no place on two devices
        ("8x1", 8, 16, True, "auto"),  # eight rows have no place on dp=16
    ],
)
def test_a_resumed_run_adapts_to_the_devices_there_are(mesh_before, batch, devices, all_of_them, expected, said):
    before = Config.of(heads=8, mesh=mesh_before, batch=batch)
    after = adapt_to_devices(before, devices, all_of_them)
    assert after == before.replace(mesh=expected)
    size = before.parallel.dp * before.parallel.mp
    hint = f"{format_count(size, 'device')} before, {devices} now: mesh={mesh_before} becomes mesh={expected}"
    hint += f", batch={batch} stays"
    assert [line.partition(";")[0] for line in said] == ([] if expected == mesh_before else [hint])
