"""A run that predicts two tokens: other uses than training read its language model only."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.analysis.verify import on_one_device
from shardformer.cli.loading import load_corpus
from shardformer.convert import safetensors_files
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.run_folder import Run
from tests import runs, shared
from tests.integration import objective_reference

pytestmark = pytest.mark.slow
KEYS = ["mesh=2x2", "zero=3", "sequence_parallel=true", "layers=1", "d_model=16", "heads=2", "d_ff=16", "seq=8",
        "batch=4", "warmup=1", "norm=rmsnorm", "activation=swiglu", "block=sequential", "bias=none", "eval_batches=1",
        "log_every=1", "objective=mtp", "mtp_weight=0.5", "ema=0.5"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a run, beside the run of its language model."""
    folder = tmp_path_factory.mktemp("mtp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFORMER_CACHE", str(folder / "cache"))
        (folder / "prompts.txt").write_text("the cat")
        words = [f"data={runs.text(folder)}", f"eval_prompts={folder}/prompts.txt", f"out={folder}/run"]
        assert runs.train("tiny", *KEYS, "steps=2", *words) == 0
        assert main(["convert", f"{folder}/run", f"{folder}/codes", "weights=int8"]) == 0
        assert main(["convert", f"{folder}/codes", f"{folder}/plain", "weights=float"]) == 0
        yield folder


def list_modules(params: dict) -> set[str]:
    return {module for module in params if "/next/" in module}


def assert_same(got: dict, expected: dict, modules) -> None:
    assert modules
    for module in modules:
        assert jax.tree.all(jax.tree.map(np.array_equal, got[module], expected[module])), module


def test_metrics_have_the_second_loss_of_their_batch(folder):
    run = Run.open(folder / "run")
    trainer = shared._trainer(run.config)
    batches = load_corpus(run.config, run.vocabulary).train_batches(run.config, 0, trainer.local_rows)
    batch = next(batches)
    batches.close()
    params = jax.tree.map(np.asarray, trainer.init().params)

    def compute_total(weight: float) -> float:
        config = on_one_device(run.config).replace(mtp_weight=weight)
        formula = functools.partial(objective_reference.predict_two_tokens, config)
        return float(exact.run(formula, params, batch).outputs)

    expected = compute_total(2.0) - compute_total(1.0)
    assert float(runs.rows(folder / "run")[0]["mtp_loss"]) == pytest.approx(expected, rel=1e-5)


def test_monitor_continues_prompts_by_the_language_model(folder):
    lines = (folder / "run" / "texts.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights"] for line in lines] == ["last", "average"]


@pytest.mark.parametrize("averaged", [False, True])
def test_language_model_is_read_without_the_prediction(folder, averaged):
    run = Run.open(folder / "run")
    settings = run.config.for_inference("1x1")
    assert settings.preferences.objective == "lm"
    _, params = run.restore_params(Model.on(settings, mesh.make(settings)), averaged=averaged)
    _, trained = run.restore_params(shared._trainer(run.config).model, averaged=averaged)
    assert list_modules(trained)
    assert not list_modules(params)
    assert_same(params, trained, params)


def test_converted_run_is_that_of_a_language_model(folder):
    assert Run.open(folder / "plain").config.preferences.objective == "lm"


def test_model_of_hugging_face_has_no_prediction(folder):
    assert main(["convert", f"{folder}/run", f"{folder}/hf", "format=hf"]) == 0
    names = safetensors_files.read_header(folder / "hf" / "model.safetensors").keys()
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("next" in name or "layers.1" in name for name in names)


@pytest.mark.parametrize(("base", "objective"), [("plain", "mtp"), ("run", "lm")])
def test_base_gives_what_the_new_run_has_room_for(folder, base, objective):
    run, source = Run.open(folder / "run"), Run.open(folder / base)
    config = run.config.replace(base=str(folder / base), objective=objective, seed=7)
    trainer = shared._trainer(config)
    params = dataclasses.replace(run, config=config).make_first_state(trainer).params
    _, of_base = source.restore_params(shared._trainer(source.config).model)
    assert bool(list_modules(params)) == (objective == "mtp")
    assert_same(params, of_base, params.keys() & of_base.keys())
    if base == "plain":
        assert_same(params, trainer.model.init(7), list_modules(params))
