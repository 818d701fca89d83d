"""The table of compiler options."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardformer.devices import chips
from shardformer.layout import mesh
from shardformer.training import step
from shardformer.training.trainer import Trainer
from tests import shared


def mesh_of(platform, kind, devices=16):
    """Returns the part of a mesh that `find_options` reads."""
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    return types.SimpleNamespace(devices=np.array([[device]]), size=devices)


@pytest.mark.parametrize(
    ("platform", "kind", "found"),
    [
        ("tpu", "TPU v4", chips.EXCHANGING | chips.OPTIONS["v4"]),
        ("tpu", "TPU v5 lite", chips.EXCHANGING | chips.OPTIONS["v5e"]),
        ("tpu", "TPU v5", chips.EXCHANGING | chips.OPTIONS["v5p"]),
        ("tpu", "a TPU of tomorrow", chips.EXCHANGING),
        ("cpu", "cpu", None),
    ],
)
def test_options_are_those_of_the_chip(platform, kind, found):
    assert chips.find_options(mesh_of(platform, kind)) == found


def test_large_slices_of_v5e_cannot_exchange():
    """libtpu ends the compilation of a program with an all-to-all: "not supported on limited ICI"."""
    assert chips.find_options(mesh_of("tpu", "TPU v5 lite", 32)) == chips.OPTIONS["v5e"]


def test_a_mesh_without_devices_has_no_options():
    assert chips.find_options(AbstractMesh((8, 1), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)) is None


def test_step_is_compiled_with_the_options(monkeypatch):
    """By an option that no compiler knows."""
    monkeypatch.setattr(step, "find_options", lambda mesh: {"xla_no_such_option": "1"})
    config = shared.tiny(mesh="1x1")
    trainer = Trainer(config, mesh.make(config))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        trainer.lower(trainer.abstract, shared.batch())[0].compile()
