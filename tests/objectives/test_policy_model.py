"""Losses and gradients of sampled answers are those of TRL 1.16, on every mesh and however rows are split."""

import functools
import json

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import verify_exact
from shardformer.convert import hf_settings
from shardformer.model import model as plain_model
from shardformer.objectives.rollouts import compute_advantages, penalise_divergence
from tests import asserts, meshes, tiers
from tests.objectives import pairs
from tests.objectives.record_policy import CASES, REWARDS
from tests.objectives.record_preferences import FOLDER

RECORDED = json.loads((FOLDER / "policy.json").read_text())
# The results are recorded in float64, their gradients rounded to float32: we are 3.4e-8 from them in float64 and 9.5e-7
# in float32, in which meshes sum in different orders.
MOST, MOST_IN_FLOAT64 = 1.5e-6, 1e-7
SPLIT = (
    {"mesh": "4x2", "zero": 3, "accum": 2},
    {"mesh": "dp2.cp2.mp2", "loss_chunk": 5},
)


def make_batch(config, kind=np.float32) -> dict:
    """Returns the recorded answers in rows, as a rollout lays them out, with floats of a kind."""
    answers = [(pair["prompt"], pair[side]) for pair in pairs.RECORDED["pairs"] for side in ("chosen", "rejected")]
    shape = len(answers), config.model.seq + 1
    names = ("weights", "sampled", "references")
    batch = {"ids": np.zeros(shape, np.int32)} | {name: np.zeros(shape, kind) for name in names}
    for row, (prompt, answer) in enumerate(answers):
        start, end = len(prompt), len(prompt) + len(answer)
        batch["ids"][row, :end] = prompt + answer
        batch["weights"][row, start:end] = 1 / len(answer) if config.objective.weighs_answers else 1
        for name in names[1:]:
            batch[name][row, start:end] = RECORDED[name][row]
    ids = batch.pop("ids")
    keys = config.preferences
    advantages = compute_advantages(np.array(REWARDS), 2, keys.objective)
    lengths = np.array([len(answer) for _, answer in answers], kind)
    batch = {name: values[:, 1:] for name, values in batch.items()} | {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "rewards": np.array(REWARDS, kind), "lengths": lengths,
        "advantages": np.repeat(advantages[:, None], config.model.seq, 1).astype(kind),
    }  # fmt: skip
    if keys.objective == "rloo":
        batch["advantages"] = exact.run(functools.partial(penalise_divergence, keys), batch).outputs.astype(kind)
    return batch


def make_config(case: str, **changes):
    _, config = hf_settings.read_config(FOLDER)
    keys = {"objective": "grpo", "group_size": 2, "answer_tokens": 8, "documents": "padded", "mask_prompt": True}
    keys |= {"mesh": "1x1", "batch": 8, "seq": pairs.SEQ, "clip": 0.0} | CASES[case][0] | changes
    return config.replace(**keys)


@functools.cache
def run_recorded(case: str, **changes):
    return run(case, {}, **changes)


def run(case: str, other: dict, **changes):
    """Returns our `PolicyLoss` and gradients of a recorded case, on the host; `other` arrays replace recorded ones."""
    trainer = pairs.make_trainer(make_config(case, **changes))
    batch = make_batch(trainer.config) | other
    batch = {name: batch[name] for name in trainer.model.batch_shapes()}
    step = pairs.compiled(trainer)
    return jax.tree.map(np.asarray, step(pairs.read_params(trainer), trainer.to_devices(batch), trainer.dropout_key(0)))


def distance(case: str, result) -> float:
    """Returns the larger of the relative differences of the loss and of the gradient, as one vector, from TRL's."""
    losses, grads = result
    expected = jax.tree.leaves(pairs.recorded_gradients(f"policy_{case}", grads))
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
    off = asserts.relative(got, np.concatenate([np.ravel(leaf) for leaf in expected]))
    return max(abs(float(losses.loss) - RECORDED["cases"][case]["loss"]), off)


@pytest.mark.parametrize("case", tiers.shorten(CASES))
def test_loss_and_gradient_are_those_of_trl(case):
    assert distance(case, run_recorded(case)) <= MOST


@functools.cache
def run_exactly(case: str, **changes) -> verify_exact.Result:
    """Returns our results for the recorded answers in float64."""
    config = make_config(case, **changes)
    trainer = pairs.make_trainer(make_config(case))
    batch = {
        name: values for name, values in make_batch(config, np.float64).items() if name in trainer.model.batch_shapes()
    }
    return meshes.compute_gradients(config, batch, jax.tree.map(np.asarray, pairs.read_params(trainer)))


@pytest.mark.parametrize("case", CASES)
def test_split_answers_equal_one_device_and_trl(case):
    expected = run_exactly(case)
    assert distance(case, (expected.run.outputs[0], expected.gradients)) <= MOST_IN_FLOAT64
    for changes in SPLIT:
        meshes.assert_exact(verify_exact.compare(run_exactly(case, **changes), expected, f"one device, {changes}"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", SPLIT[:1], ids=str)
def test_split_answers_give_the_results_of_trl(changes):
    assert distance("grpo", run_recorded("grpo", **changes)) <= MOST


@pytest.mark.parametrize("case", ["grpo", "dr_grpo"])
def test_advantages_are_those_of_trl(case):
    found = compute_advantages(np.array(REWARDS), 2, make_config(case).preferences.objective)
    np.testing.assert_allclose(found, RECORDED["advantages"][case], rtol=1e-12)


def test_advantages_less_the_divergence_are_those_of_trl():
    found = make_batch(make_config("rloo"), np.float64)["advantages"]
    np.testing.assert_allclose(found[:, 0], RECORDED["advantages"]["rloo"], rtol=1e-7)
    without = compute_advantages(np.array(REWARDS), 2, "rloo")
    np.testing.assert_allclose(without, np.array(REWARDS) - np.array(REWARDS).reshape(-1, 2)[:, ::-1].ravel())
    assert np.abs(found[:, 0] - without).max() > 1e-2


def test_metrics_are_those_of_trl():
    losses, recorded = run_exactly("dapo").run.outputs[0], RECORDED["cases"]["dapo"]
    assert losses.kl == pytest.approx(recorded["kl"], rel=2e-6)
    assert losses.clip_share == pytest.approx(recorded["clip_ratio/region_mean"], rel=1e-6)
    assert losses.reward == pytest.approx(np.mean(REWARDS), rel=1e-6)
    assert losses.accuracy == pytest.approx(np.mean(np.array(REWARDS) > 0))
    assert losses.answer_length == pytest.approx(np.mean(list(map(len, RECORDED["sampled"]))), rel=1e-6)


@pytest.mark.parametrize("case", ["dapo", "clip"])
def test_shapes_of_a_batch_are_those_of_a_rollout(case):
    trainer = pairs.make_trainer(make_config(case))
    batch = make_batch(trainer.config)
    for name, shape in trainer.model.batch_shapes().items():
        assert (batch[name].shape, batch[name].dtype) == (shape.shape, shape.dtype)


# Negative twins: each breaks what published trainers broke, and the comparison notices.


def assert_different(result) -> None:
    assert distance("grpo", result) > 1e-3


def test_log_probabilities_of_the_next_token_are_noticed():
    """A roll off by one."""
    assert_different(run("grpo", {"sampled": np.roll(make_batch(make_config("grpo"))["sampled"], 1, axis=1)}))


def test_renormalised_log_probabilities_are_noticed():
    """A sampler that leaves out a third of the probability by top-p gives others."""
    sampled = make_batch(make_config("grpo"))["sampled"]
    assert_different(run("grpo", {"sampled": sampled - np.float32(np.log(2 / 3)) * (sampled != 0)}))


def test_lost_end_of_text_is_noticed():
    batch = make_batch(make_config("grpo"))
    assert_different(run("grpo", {"weights": batch["weights"] * (batch["targets"] != 1)}))


def test_reference_that_is_the_sampler_is_noticed():
    assert_different(run("grpo", {"references": make_batch(make_config("grpo"))["sampled"]}))


def test_equal_tokens_instead_of_answers_are_noticed():
    assert_different(run("grpo", {"weights": np.sign(make_batch(make_config("grpo"))["weights"])}))


def test_mean_of_microbatches_is_noticed(broken):
    """Answers have different numbers of tokens: a mean of microbatches' means weighs them otherwise."""
    broken(plain_model, "normalise_weights", lambda batch: batch | {"weights": batch["weights"] / 16})
    result = run_exactly.__wrapped__("grpo", accum=2)
    assert_different((result.run.outputs[0], result.gradients))
