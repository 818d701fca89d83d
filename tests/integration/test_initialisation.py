"""A seed is one model on every mesh, and no device holds more than its slice of it."""

import jax
import numpy as np
import pytest

from shardformer.analysis import program_collectives
from shardformer.layout import mesh
from shardformer.model import Model
from tests import asserts, shared, tiers
from tests.integration.made_up import FINE, GPT2, apply, noise, numpy

DRAWS_BY_XLA = True  # see conftest.py


# One model on every mesh.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "meshes"),
    [
        ({"zero": 3}, ("4x2",)),
        ({}, ("2x4",)),
        tiers.at_night(({"init_std": None}, ("2x4",))),
        (GPT2, ("4x2", "1x8")),
        tiers.at_night(({"positions": "t5"}, ("2x4",))),
        ({"lora_rank": 2, "accum": 2}, ("2x2x2",)),
    ],
    ids=["ZeRO", "tiny", "fan-in", "GPT-2", "T5", "LoRA on stages"],
)
def test_a_seed_is_bitwise_one_model_on_every_mesh(overrides, meshes):
    params = {m: numpy(shared.trainer(mesh=m, **overrides).model.init(7)) for m in meshes}
    params["1x1"] = numpy(shared.trainer(mesh="1x1", **overrides | {"zero": 0}).model.init(7))
    assert all(asserts.is_bitwise_equal(params["1x1"], each) for each in params.values())
    assert asserts.worst_relative(shared.drawn(shared.tiny(**overrides), 7), params["1x1"]) < 1e-6
    assert asserts.worst_relative(shared.drawn(shared.tiny(**overrides), 8), params["1x1"]) > 0.1


@pytest.mark.slow
def test_the_model_does_not_depend_on_how_it_is_computed():
    params = numpy(shared.trainer(mesh="1x1").model.init(7))
    for overrides in ({"scan": False, "remat": "full"}, {"sequence_parallel": True, "dtype": "bfloat16"}):
        assert asserts.is_bitwise_equal(params, numpy(shared.trainer(mesh="2x4", **overrides).model.init(7)))
    assert not asserts.is_bitwise_equal(params, numpy(shared.trainer(mesh="1x1", init_std=0.03).model.init(7)))


# No device holds more than its slice.


def held(tree):
    """Bytes of a tree on each device that holds any of it."""
    devices = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            devices[shard.device.id] = devices.get(shard.device.id, 0) + shard.data.nbytes
    return devices


def slices(t):
    """(bytes that one device should hold of the parameters, bytes of them in all), from the specs alone."""

    def one(leaf, spec):
        return leaf.size * 4 // (t.config.parallel.mp if "mp" in spec else 1)

    leaves = jax.tree.leaves(jax.tree.map(one, t.model.shapes, t.model.specs))
    return sum(leaves), sum(leaf.size * 4 for leaf in jax.tree.leaves(t.model.shapes))


@pytest.mark.parametrize("name", tiers.shorten(["2x4", "8x1"]))
def test_no_device_holds_more_than_its_slice(name):
    t = shared.trainer(mesh=name)
    one, whole = slices(t)
    assert one == whole or one < 1.1 * whole / t.config.parallel.mp
    state = t.init()
    updated, _ = apply(mesh=name)(state, FINE, noise(state.params), np.int32(0))
    for each in (state, updated):
        assert held(each.params) == dict.fromkeys(range(8), one)
        assert held(each.optimizer) == dict.fromkeys(range(8), 2 * one + 4)  # two moments, and adam's counter


def test_an_optimizer_without_shardings_lands_on_one_device():
    t = shared.trainer(mesh="2x4")
    one, whole = slices(t)
    params = t.model.init(0)
    moments = held(jax.jit(t.optimizer.init)(params))
    assert max(moments.values()) >= 2 * whole > 2 * one + 4


@pytest.mark.slow
def test_initialisation_needs_little_memory_and_no_wire():
    config = shared.tiny(mesh="1x8", d_model=256, vocab=2000)
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(Model.abstract_parameters(config)))
    split = compiled_init(config)
    assert split.memory_analysis().temp_size_in_bytes < whole / 8
    assert program_collectives.parse_collectives(split.as_text()) == []
    assert split.memory_analysis().output_size_in_bytes < 1.1 * whole / 8
    assert compiled_init(config.replace(mesh="1x1")).memory_analysis().output_size_in_bytes >= whole


def test_initialisation_holds_the_parameters_once():
    t = shared.trainer(mesh="1x1", lora_rank=2)
    memory = t._start.lower(t.model.abstract).compile().memory_analysis()
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(t.model.shapes))
    assert memory.alias_size_in_bytes == parameters
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes < 1.2 * parameters


def compiled_init(config):
    return Model.on(config, mesh.make(config))._init.lower(np.int32(0)).compile()
