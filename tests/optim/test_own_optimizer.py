"""`optimizer=FILE.py:NAME`: any optax transformation on any mesh, its run resumed, and what is rejected."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.__main__ import main
from shardformer.analysis import traced, verify_exact
from shardformer.config import registries
from shardformer.errors import UsageError
from shardformer.optim import optimizers
from shardformer.training.trainer import Trainer
from tests import meshes, runs, shared
from tests.training.uneven_run import contents

FILE = Path(__file__).with_name("own_optimizers.py")


def own(name: str, **keys):
    return shared.tiny(**{"optimizer": f"{FILE}:{name}", "mesh": "1x1"} | keys)


def measure_states(config, expected) -> float:
    """Returns the largest relative difference of the states and metrics after three steps."""
    return max(row.relative for row in verify_exact.compare_states(meshes.run_steps(config), expected))


@pytest.mark.parametrize(
    ("name", "zero"), [("lion", 1), ("momentum", 3), ("schedule_free", 3), ("adafactor", 1), ("adafactor", 3)]
)
def test_steps_equal_one_device(name, zero):
    expected = meshes.run_steps_on_one_device(own(name))
    assert measure_states(own(name, mesh="4x2", zero=zero), expected) < meshes.EXACT


def test_another_optimizer_takes_other_steps():
    """The negative twin."""
    assert measure_states(own("momentum"), meshes.run_steps_on_one_device(own("lion"))) > 1e-3


def test_adamw_of_a_file_is_the_built_in_one():
    """The limit of the gradient's norm applies to both; one counts the steps itself."""
    keys = {"clip": 0.01, "warmup": 2, "mesh": "1x1"}
    expected = meshes.run_steps_on_one_device(shared.tiny(**keys))
    assert measure_states(own("adamw", **keys), expected) < meshes.EXACT
    assert measure_states(own("adamw", **keys | {"clip": 0.0}), expected) > 1e-6


def test_state_is_split_as_its_parameters_are():
    trainer = traced.make_trainer(own("lion", mesh="4x2", zero=1))
    moments = optim_leaves(trainer, "q")
    assert [leaf.sharding.spec for leaf in moments] == [trainer.model.grad_specs["transformer/layers"]["q"]]
    assert "dp" in str(moments[0].sharding.spec)


def test_state_of_another_shape_is_replicated():
    """Adafactor has the means of a matrix's rows and columns, and one value instead of its second moments."""
    trainer = traced.make_trainer(own("adafactor", mesh="4x2", zero=1))
    shapes = {leaf.shape: leaf.sharding.spec for leaf in optim_leaves(trainer, "q")}
    assert shapes == {(2, 32): P(), (1,): P()}


def optim_leaves(trainer, name: str) -> list:
    """Returns the arrays of the optimizer that belong to a parameter of the layers."""
    leaves = jax.tree_util.tree_leaves_with_path(trainer.abstract.optimizer)
    return [leaf for path, leaf in leaves if path[-1:] == (jax.tree_util.DictKey(name),)]


@pytest.mark.parametrize(
    "keys",
    [
        {"accum": 2, "accum_mode": "multisteps"},
        {"lr_rules": "embed=frozen"},
        {"experts": 4, "bias": "none", "balance_rate": 0.01},
        {"dtype": "bfloat16", "param_dtype": "bfloat16"},
        {"lora_rank": 2},
        {"ema": 0.9},
    ],
)
def test_own_optimizer_has_a_state_with_other_features(keys):
    trainer = traced.make_trainer(own("lion", mesh="4x2", zero=1, **keys))
    assert optim_leaves(trainer, "q_lora_in" if "lora_rank" in keys else "q")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be imported: module 'own_optimizers' has no attribute 'missing'"),
        ("number", "is a int; name a function"),
        ("nothing", "returns a function, expected an optax GradientTransformation"),
        ("of_loss", "has the parameters loss; a function may have some of keys, rate, scale_by_rate"),
        ("line_search", "update raises TypeError: .*missing 3 required keyword-only arguments: 'value', 'grad'"),
        ("fails", "the function raises AttributeError: 'OptimizerKeys' object has no attribute 'learning_rate'"),
        ("halves", "updates must be like the parameters: .*tokens.* is None, expected float32"),
        ("grows", "the state after an update must be like the state before: .*float32.*, expected int32"),
        ("exits", "the function raises RunError: the function calls sys.exit"),
    ],
)
def test_rejects_before_a_step_what_cannot_work(name, message):
    with pytest.raises(UsageError, match=message):
        traced.make_trainer(own(name))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"offload": "optimizer"}, "offload=optimizer updates one layer after the other, .*: give optimizer=adamw"),
        ({"moment_dtype": "bfloat16"}, "needs moment_dtype=float32; got moment_dtype=bfloat16"),
        ({"lr_rules": "embed=2x"}, "can only freeze, as it applies the rate itself; got embed=2x"),
        (
            {"optimizer": "lion.txt:lion"},
            "optimizer is one of adamw, muon, normuon, lbfgs, or FILE.py:NAME; got 'lion.txt:lion'",
        ),
        (
            {"optimizer": "lion.py:1"},
            "optimizer is one of adamw, muon, normuon, lbfgs, or FILE.py:NAME; got 'lion.py:1'",
        ),
        ({"optimizer": "lbfg"}, "did you mean 'lbfgs'"),
    ],
)
def test_rejects_keys_that_do_not_fit(keys, message):
    with pytest.raises(UsageError, match=message):
        own("lion", **keys)


def test_missing_file_is_named():
    with pytest.raises(UsageError, match=r"optimizer=no\.py:lion: no\.py is not a file; optimizer takes FILE\.py:NAME"):
        optim.make_optimizer(shared.tiny(optimizer="no.py:lion"))


# Runs


KEYS = ("tiny", "steps=6", "mesh=4x2", "zero=1", "eval_every=3", "save_every=3", f"optimizer={FILE}:adafactor")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("own")
    assert runs.train(*KEYS, f"data={runs.text(folder)}", f"out={folder}/run") == 0
    return folder / "run"


def test_resume_is_bitwise(finished, tmp_path):
    out = tmp_path / "run"
    words = (*KEYS, f"data={finished.parent}/text.txt", f"out={out}")

    def unplug():
        raise RuntimeError("the plug is pulled")

    with pytest.raises(RuntimeError, match="plug"):
        runs.train(*words, stop_after=5, act=unplug)
    assert runs.train("--resume", out, KEYS[-1]) == 0
    assert contents(out, 6) == contents(finished, 6)
    assert runs.rows(out) == runs.rows(finished)


def test_run_stores_no_code(finished, monkeypatch, capsys):
    """A resume names the file again; only its name is not compared."""
    assert json.loads((finished / "config.json").read_text())["optimizer"] == "own"
    assert runs.train("--resume", finished, "steps=8") == runs.USAGE
    assert "function of a user's file, which no run stores; name it again" in capsys.readouterr().err
    assert runs.train("--resume", finished, "optimizer=adamw") == runs.USAGE
    assert "optimizer cannot change on resume: the run has own, got adamw" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "lower", lambda *_: [])  # it starts before the state is read
    assert runs.train("--resume", finished, "steps=8", f"optimizer={FILE}:lion") == runs.FAILED
    assert "and with the optimizer=FILE.py:NAME of its run if it has one" in capsys.readouterr().err


def test_stored_code_does_not_run(finished, tmp_path, capsys):
    """A run of a stranger may name a file of the stranger's."""
    run, evil = tmp_path / "run", tmp_path / "evil.py"
    run.mkdir()
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((finished / "config.json").read_text()) | {"optimizer": f"{evil}:lion"}
    (run / "config.json").write_text(json.dumps(config))
    assert runs.train("--resume", run) == runs.FAILED
    assert "names code, which only a start may" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_conversion_of_its_moments_is_rejected(finished, tmp_path, capsys):
    """GPT-J's files have Adam's moments only."""
    assert main(["convert", str(finished), str(tmp_path / "gptj"), "format=gptj"]) == runs.USAGE
    assert "optimizer=own does not keep Adam's two moments" in capsys.readouterr().err


def test_evaluation_needs_no_optimizer(finished, capsys):
    assert main(["eval", str(finished), "mesh=1x1"]) == 0
    assert "nats/token" in capsys.readouterr().out
    assert np.isfinite(float(runs.rows(finished)[-1]["loss"]))


def test_registered_optimizer_has_the_rules_of_code(monkeypatch):
    """It applies the rate itself, so a factor of lr_rules would have no effect; its update is tried by shapes."""
    monkeypatch.setattr(registries, "ADDED", {})

    def sgd_of_a_program(rate):
        return optax.sgd(rate)

    optimizers.OPTIMIZERS.register(sgd_of_a_program)
    try:
        keys = {"optimizer": "sgd_of_a_program"}
        assert own("lion", **keys).optimizer.is_code
        optim.make_optimizer(own("lion", **keys))
        with pytest.raises(UsageError, match=r"lr_rules with optimizer=sgd_of_a_program can only freeze"):
            own("lion", **keys, lr_rules="*bias=10x")
    finally:
        del optimizers.OPTIMIZERS["sgd_of_a_program"]
