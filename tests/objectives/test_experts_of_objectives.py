"""Experts under every objective: terms of the loss are those of the global batch on every mesh, and biases move."""

import functools

import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.analysis.verify_exact import Result
from shardformer.config.names import LAYERS, ROUTER_BIAS
from shardformer.model.measuring import measure_routes
from tests import meshes, shared

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


def make_config(objective: str, teacher: str, **changes):
    keys = KEYS | OBJECTIVES[objective] | ({"teacher": teacher} if objective == "distill" else {})
    return shared.tiny(**keys | {"objective": objective, "mesh": "1x1", "z_loss": 0.1} | changes)


measure = functools.cache(meshes.compute_gradients)


def losses_of(result: Result):
    return result.run.outputs[0]


@pytest.mark.parametrize(("objective", "changes"), SPLIT, ids=str)
def test_losses_and_gradients_are_those_of_one_device(teacher, objective, changes):
    got, expected = measure(make_config(objective, teacher, **changes)), measure(make_config(objective, teacher))
    meshes.assert_exact(verify_exact.compare(got, expected, "one device"))
    np.testing.assert_allclose(losses_of(got), losses_of(expected), rtol=meshes.EXACT, atol=meshes.EXACT)


@pytest.mark.parametrize("objective", ["kto", "dpo", "grpo"])
def test_z_loss_is_added_with_its_weight(teacher, objective):
    """The loss of these is the minimised one."""
    losses, without = (losses_of(measure(make_config(objective, teacher, **keys))) for keys in ({}, {"z_loss": 0.0}))
    assert losses.z_loss == without.z_loss
    assert losses.loss - without.loss == pytest.approx(np.float32(0.1) * losses.z_loss, rel=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_biases_move_against_the_load(teacher, objective):
    trainer = traced.make_trainer(config := make_config(objective, teacher))
    gradient = measure(config).gradients[LAYERS][ROUTER_BIAS]
    rows = {name: values for name, values in verify_exact.draw_batch(trainer).items() if name != "teacher"}
    count_routes = functools.partial(measure_routes, trainer.model)
    count_LE = exact.run(count_routes, verify_exact.draw_parameters(config), rows).outputs
    excess_LE = count_LE * count_LE.shape[1] - count_LE.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, excess_LE / config.model_rows, rtol=1e-12, atol=1e-12)
    assert np.abs(excess_LE).max() > 0
