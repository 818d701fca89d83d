"""Adapters and averages as a user meets them: a base, another text, a merge; weights that are an average."""

import csv
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.adapters import lora
from shardformer.analysis import verify, verify_exact
from shardformer.convert import runs as whole
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.run_folder import Run
from tests import meshes, runs, shared

SETTINGS = {"mesh": "4x2", "steps": 6, "eval_every": 3, "save_every": 3, "log_every": 1, "eval_batches": 1}


def train(text, out, **changes):
    settings = SETTINGS | changes | {"data": text, "out": out}
    return runs.train("tiny", *(f"{key}={value}" for key, value in settings.items()))


@pytest.fixture(scope="module")
def base(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("base") / "run"
    assert train(text, out, ema=0.5) == 0
    return out


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, text, base):
    out = tmp_path_factory.mktemp("adapted") / "run"
    assert train(text, out, base=base, lora_rank=2, lora_targets="q,down", lr=1e-2) == 0
    return out


def command(*words):
    return main([str(word) for word in words])


def params(out, step=0):
    with whole.open_state(Run.open(out), step, with_moments=False) as state:
        return {name: leaf[...] for name, leaf in state.params.items()}


@pytest.mark.nightly
def test_run_with_a_base_starts_from_its_best_checkpoint(base, adapted):
    before, after = params(base), params(adapted, step=6)
    assert set(before) < set(after)
    for name, leaf in before.items():
        assert np.array_equal(leaf, after[name]), name
    assert all("_lora_" in name and np.any(after[name]) for name in set(after) - set(before))


@pytest.mark.slow
def test_merged_adapters_are_a_plain_run_with_the_same_loss(tmp_path, adapted, capsys):
    merged = tmp_path / "merged"
    assert command("convert", adapted, merged, "merge_lora=true") == 0
    losses = []
    for out in (adapted, merged):
        capsys.readouterr()
        assert command("eval", out, "split=validation", "mesh=1x1") == 0
        losses.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")])
    assert losses[0]
    assert losses[0] == losses[1]
    assert not any("_lora_" in name for name in params(merged))
    assert runs.train("--resume", str(merged), "steps=8") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 2, "d_model": 64}, "d_model=64 contradicts base="),
        ({"lora_rank": 2, "base": "nowhere"}, "base=nowhere does not exist"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(tmp_path, text, finished_run, capsys, changes, message):
    assert train(text, tmp_path / "run", **{"base": finished_run} | changes) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_adapters_are_rejected_as_a_base_and_required_to_merge(tmp_path, text, finished_run, capsys):
    """Before any array is read: the run with adapters has the arrays of one without."""
    adapted = shutil.copytree(finished_run, tmp_path / "adapted")
    for path in (adapted / "config.json", *adapted.glob("step_*/config.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_rank": 2, "lora_targets": "q,down"}))
    assert train(text, tmp_path / "run", base=adapted) == 2
    assert "merge them first: convert" in capsys.readouterr().err
    assert command("convert", finished_run, tmp_path / "merged", "merge_lora=true") == 2
    assert "it has no adapters to merge" in capsys.readouterr().err


@pytest.mark.slow
def test_the_average_is_used_on_request(base, adapted, capsys):
    outputs = []
    for ema in ("false", "true"):
        assert command("eval", base, "split=validation", f"ema={ema}", "step=6") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]
    assert command("sample", base, "ema=true", "tokens=5") == 0
    assert command("eval", adapted, "ema=true") == 2
    assert "it was trained with ema=0" in capsys.readouterr().err


def test_the_average_is_that_of_the_weights(tmp_path, text):
    """The average of three saved steps is (0.5 * a + 0.25 * b + 0.125 * c) / 0.875."""
    out = tmp_path / "run"
    assert train(text, out, ema=0.5, steps=3, save_every=1, keep=9) == 0
    weights = [params(out, step)["transformer/layers/q"] for step in (1, 2, 3)]
    expected = (0.125 * weights[0] + 0.25 * weights[1] + 0.5 * weights[2]) / 0.875
    run = Run.open(out, {"mesh": "1x1"})
    step, found = run.restore_params(Model.on(run.config, mesh.make(run.config)), averaged=True)
    assert step == 3
    np.testing.assert_allclose(
        found["transformer/layers"]["q"], expected, rtol=1e-6, atol=1e-9
    )  # weights of 1e-2 may cancel


@pytest.mark.nightly
def test_gradient_metrics_are_written_and_go_on_after_a_resume(tmp_path, text):
    out = tmp_path / "run"
    assert train(text, out, grad_metrics=True, steps=2) == 0
    assert runs.train("--resume", str(out), "steps=4") == 0
    with (out / "gradients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert all(0 < float(row["example_norm_mean"]) <= float(row["example_norm_max"]) for row in rows)
    assert float(rows[-1]["example_norm_layer_1"]) > 0


@pytest.mark.slow
def test_rules_are_told_and_one_that_catches_nothing_is_refused(tmp_path, text, capsys):
    assert train(text, tmp_path / "run", steps=1, lr_rules="norm=frozen,bias=10x") == 0
    assert "norm" in (told := capsys.readouterr().out)
    assert "frozen" in told
    assert train(text, tmp_path / "other", steps=1, lr_rules="nrom=frozen") == 2
    assert "nrom" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_run_with_gradient_metrics_can_be_sampled(tmp_path, text):
    assert train(text, tmp_path / "run", grad_metrics=True, steps=2) == 0
    assert command("sample", tmp_path / "run", "tokens=3") == 0


def test_new_adapters_have_the_scale_of_their_inputs():
    config = shared.tiny(mesh="1x1", lora_rank=64, lora_targets="q,down")
    layers = {"q": jnp.ones((2, 32, 32)), "down": jnp.ones((2, 128, 32))}
    found = lora.add_adapters({"transformer/layers": layers}, config, jax.random.key(0))["transformer/layers"]
    for name, inputs in (("q", 32), ("down", 128)):
        assert np.std(found[f"{name}_lora_in"]) == pytest.approx(inputs**-0.5, rel=0.05)
        assert not found[f"{name}_lora_out"].any()


EVERY = {"lora_rank": 2, "lora_targets": "q,o:3,down:1", "lora_dropout": 0.4}


@pytest.mark.parametrize(
    "keys",
    [
        {"mesh": "2x4", "zero": 3},
        {"mesh": "4x2", "zero": 1, "accum": 2, "rslora": True},
        {"mesh": "dp2.cp2.mp2", "sequence_parallel": True},
        {"mesh": "2x2x2", "accum": 2},
    ],
    ids=str,
)
def test_adapters_with_dropout_equal_one_device(keys):
    """Each mesh draws the masks of one device; no adapter is zero, and no other dropout hides a difference."""
    meshes.assert_equals_one_device(with_steps="zero" in keys, **EVERY | keys)


def test_other_dropout_of_adapters_is_noticed():
    config = shared.tiny(mesh="2x4", **EVERY)
    rows = verify_exact.compare(
        meshes.compute_gradients(config), meshes.compute_dense(config.replace(lora_dropout=0.41)), "dense"
    )
    assert not all(row.passes for row in rows)


@pytest.mark.slow
def test_compiled_dropout_of_adapters_is_that_of_the_reference(monkeypatch):
    monkeypatch.setattr(verify_exact, "SPREAD", 0.1)  # with 0.3, float32 is 2e-5 from float64 in both programs
    trainer, batch = shared.trainer(mesh="2x4", **EVERY), shared.batch()
    params = verify_exact.draw_parameters(trainer.config)
    key = np.asarray(trainer.dropout_key(3))
    got = verify.loss_and_gradients(trainer.model, params, batch, key)[:2]
    expected = verify_exact.compute_dense(trainer.config, params, batch, key)
    rows = verify.compare_loss_and_gradients((expected.loss, expected.gradients), got)
    assert [row for row in rows if not row.passes] == []


@pytest.mark.slow
def test_merging_changes_no_weight_of_the_run(tmp_path, base, adapted):
    """To take the adapters out again, use the run: subtracting them does not restore float32 weights."""
    before = params(adapted, step=6)
    assert command("convert", adapted, tmp_path / "merged", "merge_lora=true", "step=6") == 0
    assert command("convert", adapted, tmp_path / "again", "merge_lora=true", "step=6") == 0
    merged, again = params(tmp_path / "merged"), params(tmp_path / "again")
    assert all(np.array_equal(merged[name], again[name]) for name in merged)
    name = "transformer/layers/q"
    assert np.array_equal(params(adapted, step=6)[name], params(base)[name])
    added = 8.0 * (before[f"{name}_lora_in"] @ before[f"{name}_lora_out"])
    np.testing.assert_allclose(merged[name] - added, params(base)[name], atol=1e-6)
    assert not np.array_equal(merged[name] - added, params(base)[name])
