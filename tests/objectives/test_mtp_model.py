"""The losses of multi-token prediction and their gradient are those of its formula, on every mesh."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.analysis import traced, verify, verify_exact
from shardformer.cli import eval_command
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.layout import specs
from shardformer.model import Model, flops
from shardformer.model.task_on_mesh import choose_task
from shardformer.objectives import mtp_model
from shardformer.objectives.mtp_model import MtpModel, find_next_shapes
from shardformer.session import make_sampling_model
from tests import meshes, shared
from tests.integration import objective_reference

KEYS = {"objective": "mtp", "layers": 1, "d_model": 16, "heads": 8, "d_ff": 16, "seq": 16, "batch": 8}
WITH_FORMULA = (
    {
        "tied": True,
        "documents": "masked",
        "z_loss": 0.1,
        "positions": "learned",
        "window": 5,
        "window_pattern": "fw",
        "layers": 2,
    },
    {"mesh": "4x2", "zero": 3, "accum": 2, "documents": "masked", "block": "sequential", "previous_tokens": 2},
)
SPLIT = (
    {"mesh": "1x8", "kv_heads": 2, "sequence_parallel": True},
    {"mesh": "2x2", "zero": 3, "sequence_parallel": True, "dropout": 0.2, "remat": "full"},
)
SPLIT_OTHERWISE = (
    {"mesh": "1x2x2", "accum": 2, "dropout": 0.2, "layers": 2},
    {"mesh": "4x2", "experts": 4, "bias": "none", "balance_loss": 0.1, "zero": 1, "loss_chunk": 5},
    {"mesh": "dp2.cp2.mp2", "seq": 32},
)


def make_config(**changes) -> Config:
    return shared.tiny(**KEYS | {"mesh": "1x1"} | changes)


def draw_batch(config: Config) -> dict:
    return verify_exact.draw_batch(traced.make_trainer(config))


def compute(config: Config, batch: dict | None = None) -> verify_exact.Result:
    """Returns the minimised loss and its gradient."""
    result = meshes.compute_gradients(config, draw_batch(config) if batch is None else batch)
    return result._replace(loss=objective_reference.add_up(config, result.run.outputs[0]))


@functools.cache
def compute_expected(config: Config) -> verify_exact.Result:
    of_formula = functools.partial(objective_reference.predict_two_tokens, config)
    run = exact.run(jax.value_and_grad(of_formula), verify_exact.draw_parameters(config), draw_batch(config))
    return verify_exact.Result(*run.outputs, run)


def find_differences(config: Config, batch: dict | None = None) -> list:
    return verify_exact.compare(compute(config, batch), compute_expected(meshes.simplify(config)), "the formula")


@pytest.mark.parametrize("changes", WITH_FORMULA, ids=str)
def test_loss_and_gradient_are_those_of_the_formula(changes):
    meshes.assert_exact(find_differences(make_config(**changes)))


@pytest.mark.parametrize("changes", SPLIT, ids=str)
def test_split_rows_equal_one_device(changes):
    meshes.assert_equals_one_device(with_steps=False, **KEYS | changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", SPLIT_OTHERWISE, ids=str)
def test_other_features_equal_one_device(changes):
    meshes.assert_equals_one_device(with_steps=False, **KEYS | changes)


@pytest.mark.slow
def test_steps_equal_one_device():
    meshes.assert_equals_one_device(**KEYS, mesh="4x2", zero=3, accum=2, optimizer="muon", ema=0.5)


def test_target_of_another_document_is_noticed():
    config = make_config(**WITH_FORMULA[0])
    batch = draw_batch(config)
    rows = find_differences(config, batch | {"documents": np.roll(batch["documents"], 1, axis=1)})
    assert not rows[0].passes


def test_targets_of_the_first_loss_are_noticed(broken):
    broken(mtp_model, "_shift", lambda x_BT: x_BT)
    assert not find_differences(make_config(**WITH_FORMULA[0]))[0].passes


def test_every_parameter_of_the_prediction_learns():
    config = make_config()
    gradients = compute(config).gradients
    assert {module: {*leaves} for module, leaves in find_next_shapes(config).items()} == {
        module: {name for name, leaf in leaves.items() if np.abs(leaf).max() > 1e-6}
        for module, leaves in gradients.items()
        if "/next/" in module
    }


def test_metric_is_the_mean_of_tokens_with_a_target():
    """The model's own loss is that of the language model."""
    config = make_config(mesh="4x2", **WITH_FORMULA[0])
    params, batch = verify_exact.draw_parameters(config), draw_batch(config)
    losses = meshes.compute_gradients(config, batch).run.outputs[0]

    def compute_total(weight: float) -> float:
        formula = functools.partial(objective_reference.predict_two_tokens, config.replace(mtp_weight=weight))
        return float(exact.run(formula, params, batch).outputs)

    assert losses.mtp_loss == pytest.approx(compute_total(2.0) - compute_total(1.0), rel=1e-12)
    plain = {module: leaves for module, leaves in params.items() if "/next/" not in module}
    of_lm = meshes.compute_gradients(config.replace(objective="lm"), batch, plain).loss
    assert losses.loss == pytest.approx(of_lm, rel=1e-14)


def test_evaluation_is_that_of_the_language_model():
    config = make_config(mesh="2x2")
    batch = draw_batch(config)
    params = verify_exact.draw_parameters(config)
    model = traced.make_trainer(config).model
    plain = traced.make_trainer(config.objective.as_language_model()).model
    got = exact.run(model.sums, params, batch, shapes=(model.shapes, verify_exact.describe(batch))).outputs
    of_lm = {module: params[module] for module in plain.shapes}
    expected = exact.run(plain.sums, of_lm, batch, shapes=(plain.shapes, verify_exact.describe(batch))).outputs
    np.testing.assert_allclose(got, expected, rtol=1e-14)


@pytest.mark.parametrize("changes", [{}, {"experts": 4, "bias": "none"}], ids=str)
def test_drawn_parameters_have_the_shapes_of_the_model(changes):
    """Its layer is dense in a model with experts."""
    model = traced.make_trainer(make_config(**changes)).model
    drawn = jax.eval_shape(model.draw_parameters, 0)
    assert jax.tree.map(lambda leaf: leaf.shape, drawn) == jax.tree.map(lambda leaf: leaf.shape, model.shapes)
    assert drawn["transformer/next/join"]["w"].shape == (32, 16)
    assert drawn["transformer/next/layers"]["up"].shape == (1, 16, 16)


def test_drawn_language_model_is_that_of_the_seed():
    config = make_config()
    drawn, of_lm = (exact.run(task.draw_parameters, np.int32(3)).outputs for task in (
        traced.make_trainer(config).model, traced.make_trainer(config.replace(objective="lm")).model))  # fmt: skip
    assert jax.tree.all(jax.tree.map(np.array_equal, {name: drawn[name] for name in of_lm}, of_lm))


@pytest.mark.parametrize("embed_dim", [None, 8])
def test_flops_count_the_layer_and_the_second_head(embed_dim):
    config = make_config(tied=True, window=4, window_pattern="wf", layers=2, embed_dim=embed_dim)
    c, plain = config.model, config.objective.as_language_model()
    head = c.padded_vocab * 8 + 16 * 8 if embed_dim else c.padded_vocab * 16
    layer = 4 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 16 + head  # W too
    attention = 6 * c.seq * c.d_model  # of the last layer, which has no window
    vectors = specs.count_parameters([p for ps in find_next_shapes(config).values() for p in ps.values() if p.ndim == 1
                                      or p.shape[-2] == 1])  # fmt: skip
    added = flops.flops_per_token(config) - flops.flops_per_token(plain)
    assert added - 6 * vectors == 6 * layer + attention


def test_batch_is_that_of_the_language_model():
    """So training compiles its step early."""
    config = make_config(documents="masked")
    assert draw_batch(config).keys() == {"tokens", "targets", "weights", "documents"}
    assert draw_batch(config).keys() == draw_batch(config.replace(objective="lm")).keys()


def test_verify_names_the_comparison_that_works():
    assert not verify_exact.has_dense_reference(make_config())
    with pytest.raises(
        UsageError, match="objective=mtp has no dense reference; give objective=lm, or give verify exact=true"
    ):
        verify.random_batch(make_config())


def test_show_lists_the_parameters_of_the_prediction(capsys):
    assert main(["show", "tiny", "objective=mtp", "mesh=1x1"]) == 0
    assert "next/join" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["mtp", "lm"])
def test_eval_and_the_final_sample_read_the_language_model(objective):
    config = make_config(mesh="1x2", objective=objective)
    assert choose_task(eval_command.for_evaluation(config, "1x2")) is Model
    trainer = shared._trainer(config)
    run, evaluator = mock.Mock(config=config), mock.Mock(trainer=trainer)
    model = make_sampling_model(run, evaluator)
    assert type(model) is Model
    assert (model is trainer.model) == (objective == "lm")


def test_base_is_a_language_model_or_one_with_the_prediction():
    model = traced.make_trainer(make_config()).model
    assert model.make_base_model(make_config()) is model
    base = model.make_base_model(shared.tiny())
    assert type(base) is Model
    assert not any("/next/" in module for module in base.shapes)
    assert isinstance(model, MtpModel)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seq": 1}, "predicts the token after the next, which a row of seq=1 does not have; give seq=2"),
        ({"mtp_weight": 0.0}, "mtp_weight must be above 0, got 0.0; give objective=lm"),
        ({"lora_rank": 2}, "trains a complete further layer, and lora_rank=2 adapters only; give lora_rank=0"),
        ({"optimizer": "lbfgs"}, "which optimizer=lbfgs does not search with; give optimizer=adamw"),
        (
            {"d_model": 18, "head_dim": 2, "mesh": "2x4"},
            r"d_model=18 does not divide over mp=4 \(mesh=2x4\); try mesh=2x2",
        ),
        (
            {"experts": 4, "bias": "none", "d_ff": 18, "mesh": "2x4"},
            r"feed-forward width=18 does not divide over mp=4 \(mesh=2x4\); try mesh=2x2",
        ),
        ({"scale": "completep:16x2"}, "has no rates for the layer that objective=mtp adds; leave scale out"),
    ],
    ids=str,
)
def test_config_without_a_second_loss_is_rejected(keys, message):
    with pytest.raises(UsageError, match=message):
        make_config(**keys)
