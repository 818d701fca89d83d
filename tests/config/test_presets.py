"""Every preset is a valid configuration, on the meshes that it is made for."""

import pytest

from shardformer.cli.commands import COMMANDS
from shardformer.config.presets import PRESETS, preset
from shardformer.errors import UsageError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_on_one_device(name):
    assert preset(name).replace(mesh="1x1", zero=0).run.out == f"checkpoints/{name}"  # ZeRO splits over dp


@pytest.mark.parametrize("name", ["tiny", "shakespeare_char"])
@pytest.mark.parametrize("mesh", ["8x1", "4x2", "2x4", "1x8"])
def test_presets_that_say_so_fit_every_mesh_of_eight(name, mesh):
    assert preset(name).replace(mesh=mesh, vocab=65).parallel.mesh_shape == tuple(map(int, mesh.split("x")))


def test_unknown_preset():
    with pytest.raises(UsageError, match=r"unknown preset 'tyny'; did you mean 'tiny'\?; there are tiny, "):
        preset("tyny")


def test_help_names_every_preset():
    named = COMMANDS["train"].notes.partition("PRESET is one of ")[2].partition(", and sets")[0]
    assert named.split(", ") == list(PRESETS)
