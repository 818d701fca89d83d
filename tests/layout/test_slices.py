"""Several TPU slices, by stand-ins: mp stays within a slice, and gradients cross between slices once a step."""

from collections import Counter

import jax
import numpy as np
import pytest

from shardformer.analysis import program_collectives
from shardformer.config.names import AXES
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer
from tests import shared, wire
from tests.surroundings import simulate_devices


class InSlice:
    """A CPU device that says which slice it is of, as a TPU does."""

    def __init__(self, device, slice_index, platform):
        self.device, self.slice_index, self.platform = device, slice_index, platform

    def __getattr__(self, name):
        return getattr(self.device, name)


@pytest.fixture
def in_slices(monkeypatch):
    """Gives the eight devices to slices; returns the stand-ins. Their slices are interleaved."""

    def give(slices, platform="cpu"):
        devices = [InSlice(device, i % slices, platform) for i, device in enumerate(jax.devices())]
        simulate_devices(monkeypatch, devices)
        monkeypatch.setattr(mesh, "Mesh", lambda devices, axes: devices)
        return devices

    return give


@pytest.mark.parametrize(("slices", "shape"), [(2, "4x2"), (2, "2x4"), (2, "8x1"), (4, "4x2"), (4, "8x1")])
def test_mp_stays_within_a_slice_and_dp_crosses_them(in_slices, slices, shape):
    devices = in_slices(slices)
    made = mesh.make(shared.tiny(mesh=shape))
    number = np.vectorize(lambda device: device.slice_index)(made)
    assert made.shape == tuple(map(int, shape.split("x")))
    assert set(made.flat) == set(devices)
    assert (number == number[:, :1]).all()
    assert len(set(number[:, 0])) == slices


def test_stages_stay_within_a_slice(in_slices):
    in_slices(2)
    number = np.vectorize(lambda device: device.slice_index)(mesh.make(shared.tiny(mesh="2x2x2", accum=2)))
    assert [set(of_one_dp.flat) for of_one_dp in number] in ([{0}, {1}], [{1}, {0}])


def test_a_mesh_whose_mp_would_leave_its_slice_is_refused(in_slices):
    in_slices(4, "tpu")
    with pytest.raises(UsageError, match=r"mesh=2x4 has dp=2, which does not divide over the 4 slices.*try mesh=4x2"):
        mesh.make(shared.tiny(mesh="2x4"))


def crossing(made, shape):
    """(shape, in a loop) of what a step sends from one slice to another, by HLO; `made` is the mesh of stand-ins."""
    config = shared.tiny(mesh=shape)
    slices = [device.slice_index for device in made.flat]
    trainer = Trainer(config, jax.sharding.Mesh(np.vectorize(lambda device: device.device)(made), AXES[:2]))
    batch = {name: jax.ShapeDtypeStruct(rows.shape, rows.dtype) for name, rows in shared.batch().items()}
    hlo = trainer.lower(trainer.abstract, batch)[0].compile().as_text()
    sent = [
        c for c in program_collectives.parse_collectives(hlo) if any(len({slices[i] for i in g}) > 1 for g in c.groups)
    ]
    return Counter((c.shape, c.in_loop) for c in sent), wire.count_gradients(trainer)


@pytest.mark.slow
def test_only_gradients_and_losses_cross_slices_each_once(in_slices):
    in_slices(2)
    found, gradients = crossing(mesh.make(shared.tiny(mesh="4x2")), "4x2")
    assert found == Counter({(shape, False): times for shape, times in (gradients + wire.LOSSES).items()})


@pytest.mark.slow
def test_interleaved_slices_send_activations_between_slices(in_slices):
    """The negative twin: in the order of device numbers, mp crosses slices in every layer."""
    devices = in_slices(2)
    found, _ = crossing(np.array(devices).reshape(4, 2), "4x2")
    assert any(in_loop for _, in_loop in found)
