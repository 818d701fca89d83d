"""The tasks of scripts/examples/: each is the same on every mesh, trains to the number that it states, and resumes."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import haiku as hk
import pytest

from shardformer import Config, Session
from shardformer.analysis import verify_exact
from tests import meshes, runs, tiers

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
SETTINGS = {
    "digits": {"batch": 64, "steps": 200, "lr": 0.03},
    "masked_tokens": {"batch": 64, "steps": 250, "lr": 0.003},
    "mesh_transformer": {"batch": 32, "steps": 150, "lr": 0.003},
}
NAMES = {"digits": "Digits", "masked_tokens": "MaskedTokens", "mesh_transformer": "Counting"}
STATED = {"digits": 0.94, "masked_tokens": 0.95, "mesh_transformer": 0.9}
needs_checkout = pytest.mark.skipif(
    "MESH_TRANSFORMER_JAX" not in os.environ,
    reason="did not run: MESH_TRANSFORMER_JAX does not name a checkout of mesh-transformer-jax",
)
EVERY = [pytest.param(name, marks=needs_checkout if name == "mesh_transformer" else ()) for name in NAMES]
SLOW = [
    pytest.param("masked_tokens", "2x4", marks=pytest.mark.nightly),
    pytest.param("mesh_transformer", "4x2", marks=[pytest.mark.nightly, needs_checkout]),
]


def make_task(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, NAMES[name])()


def settings(name, mesh, **keys):
    common = {"warmup": 20, "mesh": mesh, "zero": 3, "program_cache": "none"}
    return Config.of(**SETTINGS[name] | common | keys)


def read_state(run, step):
    """Returns the arrays of a checkpoint, by name, with the checksums of their contents."""
    return json.loads((run / f"step_{step:08d}" / "manifest.json").read_text())["leaves"]


@pytest.mark.parametrize("mesh", tiers.shorten(["4x2", "2x4"]))
@pytest.mark.parametrize("name", EVERY)
def test_program_is_that_of_one_device(name, mesh):
    meshes.assert_exact(verify_exact.verify_exactly(settings(name, mesh, batch=8, task=make_task(name))))


@needs_checkout
def test_bias_that_each_shard_adds_is_found():
    """Without the edit of row-parallel products, the sum over shards has each bias once for each of them."""
    task = make_task("mesh_transformer")
    task.layers.RowLinear = hk.Linear
    rows = verify_exact.verify_exactly(settings("mesh_transformer", "4x2", batch=8, task=task))
    assert "loss" in {row.name for row in rows if not row.passes}


# One mesh trains, as the programs of all are the same; the short tier has the example that takes a few seconds.
@pytest.mark.parametrize(("name", "mesh"), [("digits", "4x2"), *SLOW])
def test_trains_to_its_number_and_resumes_bitwise(tmp_path, monkeypatch, name, mesh):
    runs.share_trainers(monkeypatch)
    task = make_task(name)
    steps, saved = SETTINGS[name]["steps"], SETTINGS[name]["steps"] - 10
    keys = {"save_every": saved, "keep": 9, "eval_every": steps, "out": str(tmp_path / "run")}
    trained = Session.create(settings(name, mesh, **keys), task=task).train()
    assert trained.evaluate()["validation"].accuracy >= STATED[name]
    killed = shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(killed / f"step_{steps:08d}")  # as if it had been killed between the two
    Session.resume(killed, task=task).train()
    assert read_state(killed, steps) == read_state(tmp_path / "run", steps)
    assert read_state(killed, saved) != read_state(killed, steps)


@pytest.mark.parametrize("name", NAMES)
def test_example_has_at_most_100_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 100
