"""The seed notebook's own cells, unedited under today's JAX, give what they gave under jax 0.4.13."""

import contextlib
import io
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from shardformer import legacy
from tests.legacy.record_notebook import TENSORFLOW_CELLS, Notebook, outputs

GOLDENS = Path(__file__).parent / "goldens" / "notebook.npz"
RTOL = 1e-6  # of each array's norm


@pytest.fixture
def old_times(tmp_path, monkeypatch):
    """A folder for the notebook's files, the names and random bits of its day, and no strictness."""
    monkeypatch.chdir(tmp_path)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        legacy.installed(legacy_random=True),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def _differences(found):
    """The relative distance of every array from its golden, where it is more than rounding."""
    goldens = np.load(GOLDENS)
    assert sorted(found) == sorted(goldens)
    assert {name: x.shape for name, x in found.items()} == {name: goldens[name].shape for name in found}
    distances = {name: _distance(found[name], goldens[name]) for name in found}
    return {name: distance for name, distance in distances.items() if not distance <= RTOL}


def _distance(x, golden):
    x, golden = np.float64(x), np.float64(golden)
    return np.linalg.norm(x - golden) / max(np.linalg.norm(golden), np.finfo(np.float32).tiny)


def test_cells_give_the_recorded_numbers(old_times):
    assert _differences(outputs(Notebook())) == {}


@pytest.mark.filterwarnings("ignore:.*varies over a named axis")
def test_a_layer_without_its_psum_does_not(old_times):
    notebook = Notebook()
    notebook.edit("11", 'return jax.lax.psum(x, "shard")', "return x")
    notebook.run("2", "3", "7", "9", "11", "12", "13")
    assert _distance(notebook.namespace["o"], np.load(GOLDENS)["layer_output.00"]) > 0.1


def test_tiny_shakespeare_cell(old_times, monkeypatch):
    import tensorflow as tf

    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 5
    datasets = types.ModuleType("tensorflow_datasets")

    def load(name):
        return {"train": tf.data.Dataset.from_tensors({"text": text})}

    datasets.load = load
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", datasets)
    notebook = Notebook()
    batch = notebook.run(*TENSORFLOW_CELLS)
    assert b"".join(batch["cur_char"].numpy().ravel()).decode() == text[:200]
    assert b"".join(batch["next_char"].numpy().ravel()).decode() == text[1:201]
    assert notebook.namespace["vocabulary"] == sorted(bytes(c, "ascii") for c in set(text))
