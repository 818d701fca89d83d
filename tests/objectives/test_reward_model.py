"""The loss of a reward model and its gradient are those of TRL's formula, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import dense_reference, traced, verify_exact
from shardformer.data.corpus import choose_row_layout
from shardformer.errors import UsageError
from shardformer.model import flops
from tests import meshes, shared
from tests.objectives import pairs

KEYS = {"objective": "reward", "layers": 1, "d_model": 16, "heads": 8, "d_ff": 16, "seq": 16, "batch": 8,
        "reward_center": 0.3}  # fmt: skip
SPLIT = (
    {"mesh": "4x2", "zero": 3, "accum": 2},
    {"mesh": "2x4", "sequence_parallel": True, "documents": "masked"},
    {"mesh": "dp2.cp2.mp2", "sequence_parallel": True},
    {"mesh": "1x1x2", "accum": 2, "layers": 2},
)


def read_scores(config, params, tokens):
    """Returns the number of every token [B, T]: the only logit of the dense model with that head."""
    plain = config.replace(objective="lm", reward_center=0.0, tied=False)
    return dense_reference.logits(plain, params | {"transformer/head": params["transformer/score"]}, tokens)[..., 0]


def compute_as_trl(config, params, batch):
    """Returns the loss of RewardTrainer with its center_rewards_coefficient."""
    chosen, rejected = (
        (read_scores(config, params, batch["tokens"][:, side]) * batch["scored"][:, side]).sum(1) for side in range(2)
    )
    of_pairs = -jnp.log(jax.nn.sigmoid(chosen - rejected))
    of_pairs += config.preferences.reward_center * (chosen + rejected) ** 2
    return (of_pairs * batch["pairs"][:, 0]).sum() / batch["pairs"].sum()


def make_config(**changes):
    return shared.tiny(**KEYS | {"mesh": "1x1"} | changes)


def draw_batch(config) -> dict:
    """Returns pairs whose sides end at different tokens; the first row has none."""
    batch = verify_exact.draw_batch(traced.make_trainer(config))
    last = np.random.default_rng(0).integers(2, config.model.seq, batch["scored"].shape[:2])
    batch["scored"] = np.eye(config.model.seq, dtype=np.float32)[last]
    batch["pairs"][:, 0], batch["pairs"][0] = 1, 0
    return batch


@functools.cache
def compute_expected(config) -> verify_exact.Result:
    run = exact.run(
        jax.value_and_grad(functools.partial(compute_as_trl, config)),
        verify_exact.draw_parameters(config),
        draw_batch(config),
    )
    return verify_exact.Result(*run.outputs, run)


def find_differences(config, expected) -> list:
    return verify_exact.compare(meshes.compute_gradients(config, draw_batch(config)), expected, "TRL's formula")


@pytest.mark.parametrize(
    "changes", [{"tied": True, "base": "a run"}, {"mesh": "4x2", "accum": 2}, {"mesh": "1x8"}], ids=str
)
def test_loss_and_gradient_are_those_of_trl(changes):
    config = make_config(**changes)
    meshes.assert_exact(find_differences(config, compute_expected(meshes.simplify(config))))


@pytest.mark.parametrize("changes", SPLIT, ids=str)
def test_split_rows_equal_one_device(changes):
    meshes.assert_equals_one_device(with_steps=False, **KEYS | changes)


def test_metrics_are_means_over_the_pairs():
    config = make_config(mesh="4x2")
    params, batch = verify_exact.draw_parameters(config), draw_batch(config)
    losses = meshes.compute_gradients(config, batch).run.outputs[0]
    tokens, scored = (batch[name].reshape(-1, config.model.seq) for name in ("tokens", "scored"))
    scores = exact.run(lambda p: read_scores(config, p, tokens), params).outputs
    chosen, rejected = (scores * scored).sum(1).reshape(-1, 2)[1:].T  # the first row has no pair
    expected = [(chosen > rejected).mean(), chosen.mean(), rejected.mean(), (chosen - rejected).mean()]
    got = losses.accuracy, losses.chosen_reward, losses.rejected_reward, losses.reward_margin
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_token_before_the_last_is_noticed():
    config = make_config()
    batch = draw_batch(config)
    got = meshes.compute_gradients(config, batch | {"scored": np.roll(batch["scored"], -1, 2)})
    assert not verify_exact.compare(got, compute_expected(config), "TRL's formula")[0].passes


def test_compiled_score_is_that_of_the_last_token():
    """The rows have no pairs, as those of a policy's answers."""
    config = make_config(batch=4, zero=3, mesh="2x2")
    trainer, params = (
        shared.trainer(**KEYS | {"batch": 4, "zero": 3, "mesh": "2x2"}),
        verify_exact.draw_parameters(config),
    )
    tokens, scored = (draw_batch(config)[name][:, 0] for name in ("tokens", "scored"))
    placed = jax.device_put(params, trainer.model.shardings)
    got = jax.jit(trainer.model.score)(placed, {"tokens": tokens, "scored": scored})
    expected = exact.run(lambda p: (read_scores(config, p, tokens) * scored).sum(1), params).outputs
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_score_of_a_split_context_is_that_of_the_last_token(attention):
    config = make_config(mesh="dp2.cp2.mp2", sequence_parallel=True, context_parallel=attention)
    params = verify_exact.draw_parameters(config)
    tokens, scored = (draw_batch(config)[name][:, 0] for name in ("tokens", "scored"))
    score = traced.make_trainer(config).model.score
    got = exact.run(score, params, {"tokens": tokens, "scored": scored}).outputs
    expected = exact.run(lambda p: (read_scores(config, p, tokens) * scored).sum(1), params).outputs
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_model_has_a_head_of_one_number():
    """In place of the vocabulary's: the optimizer has no moments of a matrix that nothing reads."""
    model = shared.trainer(**KEYS | {"batch": 4, "zero": 3, "mesh": "2x2"}).model
    drawn = jax.eval_shape(model.draw_parameters, 0)
    assert jax.tree.map(lambda leaf: leaf.shape, drawn) == jax.tree.map(lambda leaf: leaf.shape, model.shapes)
    assert drawn["transformer/score"]["w"].shape == (16, 1)
    assert "transformer/head" not in drawn


@pytest.mark.parametrize("changes", [{}, {"documents": "masked"}], ids=str)
def test_shapes_of_a_batch_are_those_of_the_data(changes):
    config = pairs.make_config("dpo", **changes).replace(objective="reward")
    windows = pairs.make_split().make_windows(choose_row_layout(config))
    batch, shapes = windows.gather(np.arange(config.training.batch)), traced.make_trainer(config).model.batch_shapes()
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in shapes.items()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rank": 2}, "objective=reward trains a complete head, and lora_rank=2 adapters only; give lora_rank=0"),
        ({"z_loss": 0.1}, "objective=reward has no logits, got z_loss=0.1"),
        ({"eval_prompts": "a.txt"}, "objective=reward trains a model that writes no text"),
        ({"loss_chunk": 64, "base": "a run"}, "no logits, and loss_chunk does nothing; give loss_chunk=auto"),
        ({"logits_scale": 0.5}, "no logits, and logits_scale does nothing; give logits_scale=1.0"),
        ({"logits_cap": 30.0}, "logits_cap does nothing; give logits_cap=none, got logits_cap=30.0"),
        ({"tied": True}, "tied does nothing; give tied=false, got tied=true"),
    ],
)
def test_key_without_a_vocabulary_is_rejected(keys, message):
    with pytest.raises(UsageError, match=message):
        make_config(**keys)


def test_flops_count_no_vocabulary():
    keys = {"objective": "reward", "base": "base", "mesh": "1x1"}
    tied, untied = (flops.flops_per_token(shared.tiny(tied=tied, **keys)) for tied in (True, False))
    assert tied == untied
    assert untied < flops.flops_per_token(shared.tiny(mesh="1x1"))
