"""Bytes per device: predicted from specs, and held by live arrays."""

import jax
import numpy as np
import pytest

from shardformer.report import memory
from tests import shared

CASES = [
    *({"mesh": mesh, "zero": zero} for mesh in ("8x1", "4x2", "2x4") for zero in (0, 1, 3)),
    {"mesh": "1x8"},
    {"mesh": "4x2", "dtype": "bfloat16"},
    {"mesh": "4x2", "zero": 1, "ema": 0.9, "ema_names": "*/q"},
    {"mesh": "4x2", "zero": 3, "lora_rank": 2},
    {"mesh": "4x2", "zero": 1, "dtype": "bfloat16", "param_dtype": "bfloat16", "moment_dtype": "bfloat16"},
    {"mesh": "4x2", "zero": 1, "optimizer": "muon", "accum": 2, "accum_mode": "multisteps"},
]


def live_state(**options):
    """Zeros in the place of a training state's arrays: what takes memory are shapes and shardings."""
    trainer = shared.trainer(**options)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer.abstract)
    return jax.device_put(zeros, trainer.shardings)


def held_bytes(tree) -> set[int]:
    """By every device, from the arrays themselves."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("options", CASES, ids=str)
def test_predicted_state_is_what_live_arrays_hold(options):
    state, predicted = live_state(**options), memory.predict_bytes(shared.tiny(**options))
    assert held_bytes(state.params) == {predicted.parameters}
    assert held_bytes((state.optimizer, state.masters)) == {predicted.optimizer}
    assert held_bytes(state.average) == {predicted.average}


@pytest.mark.parametrize(("mesh", "zero"), [("4x2", 1), ("2x4", 3)])
def test_predicted_gradients_are_what_live_gradients_hold(mesh, zero):
    trainer = shared.trainer(mesh=mesh, zero=zero)
    args = live_state(mesh=mesh, zero=zero).params, shared.batch(), trainer.dropout_key(0)
    _, gradients = jax.jit(trainer.model.loss_and_grad)(*args)
    assert held_bytes(gradients) == {memory.predict_bytes(trainer.config).gradients}


def test_what_is_split_is_counted_as_split():
    whole, split = (memory.predict_bytes(shared.tiny(mesh="8x1", zero=zero)) for zero in (0, 3))
    assert split.optimizer < whole.optimizer / 4
    assert split.parameters < whole.parameters / 4


def test_the_table_adds_up():
    config = shared.tiny(ema=0.9)
    predicted = memory.predict_bytes(config)
    lines = memory.format_device_bytes(config).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["parameters", "gradients", "optimizer", "average", "together"]
    assert predicted.total == sum(predicted)
