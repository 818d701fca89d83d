"""Losses, rewards and gradients of preference pairs are those of TRL 1.16, on every mesh and however rows are split."""

import functools

import jax
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from shardformer.data.chat import preference_windows
from shardformer.objectives import preference_model
from tests import asserts, meshes
from tests.objectives import pairs
from tests.objectives.record_preferences import CASES, PAIRS

MOST = 1e-6
SPLIT = (
    {"mesh": "2x4", "documents": "masked"},
    {"mesh": "4x2", "zero": 3, "accum": 2},
    {"mesh": "dp2.cp2.mp2", "loss_chunk": 5},
    {"mesh": "2x2x2", "accum": 2},
)


def distance(case: str, result) -> tuple[float, float]:
    """Returns the relative difference of the loss from TRL's, and that of the gradient as one vector."""
    losses, grads = result
    expected = jax.tree.leaves(pairs.recorded_gradients(case, grads))
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
    off = asserts.relative(got, np.concatenate([np.ravel(leaf) for leaf in expected]))
    return abs(float(losses.loss) / pairs.RECORDED["cases"][case]["loss"] - 1), off


def assert_same(case: str, result) -> None:
    loss, gradient = distance(case, result)
    assert loss <= MOST, f"the loss of {case} is off by {loss:.1e}"
    assert gradient <= MOST, f"the gradient of {case} is off by {gradient:.1e}"


def assert_different(case: str, result) -> None:
    assert max(distance(case, result)) > 1e-3


def test_compiled_losses_and_gradients_are_those_of_trl():
    assert_same("dpo", pairs.loss_and_grads("dpo"))


@functools.cache
def run_exactly(case: str, batch: dict | None = None, **changes) -> verify_exact.Result:
    """Returns our results for the recorded pairs in float64, or for another batch."""
    config = pairs.make_config(case, **changes)
    params = jax.tree.map(np.asarray, pairs.read_params(pairs.make_trainer(pairs.make_config(case))))
    return meshes.compute_gradients(config, pairs.make_batch(config) if batch is None else batch, params)


@pytest.mark.parametrize("case", CASES)
def test_split_pairs_equal_one_device(case):
    """Every pair of losses across cp, which splits their sums; test_verify_exact.py has each objective on a mesh."""
    expected, split = run_exactly(case), {"dpo_sft": SPLIT, "kto": SPLIT[1:]}.get(case, SPLIT[2:3])
    for changes in split:  # kto has no masked documents
        meshes.assert_exact(verify_exact.compare(run_exactly(case, **changes), expected, f"one device, {changes}"))


@pytest.mark.parametrize("case", CASES)
def test_exact_losses_and_gradients_are_those_of_trl(case):
    result = run_exactly(case)
    assert_same(case, (result.run.outputs[0], result.gradients))


@pytest.mark.slow
@pytest.mark.parametrize("changes", SPLIT[:1], ids=str)
def test_split_pairs_give_the_results_of_trl(changes):
    assert_same("dpo_sft", pairs.loss_and_grads("dpo_sft", **changes))


def test_kl_is_of_the_global_batch():
    result = run_exactly("kto", mesh="4x2", accum=2)
    assert float(result.run.outputs[0].kl) == pytest.approx(pairs.RECORDED["cases"]["kto"]["kl"], abs=4e-6)


def test_kl_of_the_own_answers_is_noticed():
    """The other answers must be of other prompts: a roll off by one would give each prompt its own."""

    def take_own(batch):
        own = {f"kl_{name}": batch[name] for name in ("tokens", "targets", "scored")}
        return own | {"kl_references": batch["references"][..., 0]}

    batch = pairs.make_batch(pairs.make_config("kto"))
    losses = run_exactly.__wrapped__("kto", batch | take_own(batch)).run.outputs[0]
    assert losses.kl != pytest.approx(pairs.RECORDED["cases"]["kto"]["kl"], rel=1e-2)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("dpo", "ipo"))])
def test_rewards_are_those_of_trl(case):
    losses, recorded = run_exactly(case).run.outputs[0], pairs.RECORDED["cases"][case]
    names = {"rewards/chosen": losses.chosen_reward, "rewards/rejected": losses.rejected_reward,
             "rewards/margins": losses.reward_margin, "rewards/accuracies": losses.accuracy,
             "logps/chosen": losses.chosen_logp, "logps/rejected": losses.rejected_logp}  # fmt: skip
    for name, value in names.items():
        assert float(value) == pytest.approx(recorded[name], rel=3e-6, abs=3e-6), name


@pytest.mark.parametrize(
    ("case", "changes"), [("dpo_sft", {}), ("dpo", {"documents": "masked"}), ("kto", {}), ("orpo", {})], ids=str
)
def test_shapes_of_a_batch_are_those_of_the_data(case, changes):
    """So that memory and plan measure the step that runs."""
    config = pairs.make_config(case, **changes)
    batch, shapes = pairs.make_batch(config), pairs.make_trainer(config).model.batch_shapes()
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in shapes.items()}


# Negative twins: each breaks what published trainers broke, and the comparison notices.


def change_batch(case: str, change, **changes):
    """Returns our results for the recorded batch after a change of its arrays."""
    batch = pairs.make_batch(pairs.make_config(case, **changes))
    return pairs.loss_and_grads(case, batch | change(batch), **changes)


def test_lost_mask_is_noticed():
    def keep_all(batch):
        return {"scored": np.ones_like(batch["scored"])}

    assert_different("dpo", change_batch("dpo", keep_all))


def test_end_of_text_lost_as_padding_is_noticed():
    """The end of text pads as well in the recorded tokenizer; it is scored where it ends an answer."""

    def drop_end(batch):
        return {"scored": batch["scored"] * (batch["targets"] != 1)}

    assert (pairs.make_batch(pairs.make_config("dpo"))["targets"] == 1).sum() == 2 * PAIRS
    assert_different("dpo", change_batch("dpo", drop_end))


def test_reference_that_is_the_trained_model_is_noticed():
    config = pairs.make_config("dpo")
    trainer, batch = pairs.make_trainer(config), pairs.make_batch(config)
    logp = jax.jit(trainer.model.log_probabilities)(pairs.read_params(trainer), trainer.to_devices(batch))
    result = pairs.loss_and_grads("dpo", batch | {"references": np.asarray(logp)})
    assert float(result[0].loss) == pytest.approx(np.log(2), abs=1e-6)  # as at the first step of a run
    assert_different("dpo", result)


def test_references_of_the_next_pair_are_noticed():
    assert_different("dpo", change_batch("dpo", lambda batch: {"references": np.roll(batch["references"], 1, axis=0)}))


def test_mean_of_microbatches_is_noticed(broken):
    """Rows without a pair count in a mean of rows, and microbatches have different numbers of pairs."""
    weights = {"scored_weight": np.ones(8, np.float32)}
    broken(preference_model, "normalise_pairs", lambda batch: batch | weights)
    result = run_exactly.__wrapped__("dpo_sft", accum=2)
    assert_different("dpo_sft", (result.run.outputs[0], result.gradients))


@pytest.mark.slow
def test_pairs_that_see_each_other_are_noticed():
    changes = {"documents": "masked"}
    assert_different(
        "dpo", change_batch("dpo", lambda batch: {"documents": np.zeros_like(batch["documents"])}, **changes)
    )


def test_packed_rows_have_all_pairs():
    config = pairs.make_config("dpo", documents="masked")
    windows = pairs.make_split().make_windows(preference_windows.RowLayout(32, mask_documents=True))
    assert windows.count < PAIRS
    assert pairs.make_batch(config)["pairs"].sum() == PAIRS
