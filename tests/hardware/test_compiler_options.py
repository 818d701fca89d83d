"""The table of compiler options."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardformer.hardware import compiler_options
from shardformer.parallel import mesh
from shardformer.training import accumulation
from shardformer.training.step import Trainer
from tests import shared


def mesh_of(platform, kind):
    """Returns the part of a mesh that `find_options` reads."""
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    return types.SimpleNamespace(devices=np.array([[device]]))


@pytest.mark.parametrize(
    ("platform", "kind", "found"),
    [("tpu", "TPU v4", compiler_options.OPTIONS["v4"]), ("tpu", "TPU v5 lite", None), ("cpu", "cpu", None)],
)
def test_options_are_those_of_the_chip(platform, kind, found):
    assert compiler_options.find_options(mesh_of(platform, kind)) == found


def test_a_mesh_without_devices_has_no_options():
    assert compiler_options.find_options(AbstractMesh((8, 1), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)) is None


def test_step_is_compiled_with_the_options(monkeypatch):
    """By an option that no compiler knows."""
    monkeypatch.setattr(accumulation, "find_options", lambda mesh: {"xla_no_such_option": "1"})
    config = shared.tiny(mesh="1x1")
    trainer = Trainer(config, mesh.make(config))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        trainer.lower(trainer.abstract, shared.batch())[0].compile()
