"""Experts under every objective: terms of the loss are those of the global batch on every mesh, and biases move."""

import functools

import jax
import numpy as np
import pytest

from shardformer.config.names import LAYERS, ROUTER_BIAS
from shardformer.layout import mesh
from shardformer.model.measuring import measure_routes
from shardformer.training.trainer import Trainer
from tests import asserts, shared

RATE = 0.01
SIZES = {"batch": 8, "layers": 2, "d_model": 16, "heads": 4, "d_ff": 16, "seq": 16, "vocab": shared.VOCAB}
KEYS = SIZES | {"experts": 4, "bias": "none", "balance_loss": 0.5, "router_z_loss": 0.1, "balance_rate": RATE}
OBJECTIVES = {
    "distill": {"distill_weight": 0.5},
    "kto": {},
    "dpo": {"sft_weight": 0.1},
    "grpo": {"group_size": 2, "answer_tokens": 4},
}
SPLIT = (
    ("distill", {"mesh": "4x2", "accum": 2}),
    ("kto", {"mesh": "2x2", "accum": 2}),
    ("dpo", {"mesh": "dp2.cp2.mp2", "loss_chunk": 5}),
    ("dpo", {"mesh": "2x1x2", "accum": 2}),
    ("grpo", {"mesh": "4x2", "accum": 2, "zero": 3}),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(**SIZES, mesh="1x1").to_json())
    return str(folder)


@functools.cache
def make_trainer(objective: str, teacher: str, **changes) -> Trainer:
    keys = KEYS | OBJECTIVES[objective] | ({"teacher": teacher} if objective == "distill" else {})
    config = shared.tiny(**keys | {"objective": objective, "mesh": "1x1", "z_loss": 0.1} | changes)
    return Trainer(config, mesh.make(config))


def make_batch(trainer: Trainer) -> dict:
    """Returns random tokens, and masks of which each row has a different number of tokens."""
    draw, batch = np.random.default_rng(0), {}
    for name, leaf in trainer.model.batch_shapes().items():
        if leaf.dtype == np.int32:
            batch[name] = draw.integers(0, shared.VOCAB, leaf.shape).astype(np.int32)
        elif name.endswith(("scored", "weights", "sft")):
            share = np.linspace(0.2, 0.9, leaf.shape[0]).reshape(-1, *[1] * (len(leaf.shape) - 1))
            batch[name] = (draw.random(leaf.shape) < share).astype(np.float32)
        else:
            batch[name] = np.ones(leaf.shape, np.float32)
    return batch


def place(trainer: Trainer) -> tuple:
    """Returns the parameters and the batch on the trainer's devices, with a teacher of another seed."""
    model = trainer.model
    teacher = {name: model.teacher.init(1) for name in model.constant_shapes()}
    return model.init(0), trainer.to_devices(make_batch(trainer)) | teacher


@functools.cache
def measure(trainer: Trainer):
    """Returns the losses and the gradient on the host."""
    result = jax.jit(trainer.model.loss_and_grad)(*place(trainer), trainer.dropout_key(0))
    return shared.on_host(result)


def distance(got, expected) -> float:
    """Returns the larger of the relative differences of a loss and of a gradient."""
    losses = max(abs(a / b - 1) for a, b in zip(got[0], expected[0], strict=True) if abs(b) > 1e-3)
    return max(losses, asserts.worst_relative(got[1], expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "changes"), SPLIT, ids=str)
def test_losses_and_gradients_are_those_of_one_device(teacher, objective, changes):
    got = measure(make_trainer(objective, teacher, **changes))
    assert distance(got, measure(make_trainer(objective, teacher))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kto", "dpo", "grpo"])
def test_z_loss_is_added_with_its_weight(teacher, objective):
    """The loss of these is the minimised one."""
    losses, without = (measure(make_trainer(objective, teacher, **keys))[0] for keys in ({}, {"z_loss": 0.0}))
    assert losses.z_loss == without.z_loss
    assert losses.loss - without.loss == pytest.approx(0.1 * losses.z_loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_biases_move_against_the_load(teacher, objective):
    trainer = make_trainer(objective, teacher)
    params, batch = place(trainer)
    gradient = measure(trainer)[1][LAYERS][ROUTER_BIAS]
    rows = {name: values for name, values in batch.items() if name != "teacher"}
    count_LE = np.asarray(jax.jit(functools.partial(measure_routes, trainer.model))(params, rows))
    excess_LE = count_LE * count_LE.shape[1] - count_LE.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, excess_LE / trainer.config.model_rows, rtol=1e-6, atol=1e-6)
    assert np.abs(excess_LE).max() > 0
