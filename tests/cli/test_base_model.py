"""`train base=FOLDER data=...`: the model is the folder's, be it a run or a Hugging Face folder."""

import shutil

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import hf_settings
from shardformer.training.run_folder import Run
from tests import runs
from tests.convert.hf_models import FOLDER

USAGE = 2


def test_a_hugging_face_folder_is_tuned_and_goes_back(tmp_path, capsys):
    """On rows that it can learn: the loss falls, and what comes back is another model of the same shape."""
    source = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    np.tile(np.arange(61), 300).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"base={source}", f"data={tmp_path / 'ids.bin'}", "steps=8", "lr=0.01", "warmup=1", "batch=8", "mesh=2x1",
             "eval_every=4", "save_every=0", "log_every=1", f"out={tmp_path / 'run'}"]  # fmt: skip
    assert runs.train(*words) == 0
    losses = [float(row["loss"]) for row in runs.rows(tmp_path / "run") if row["loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(source)
    assert (tmp_path / "back" / "model.safetensors").stat().st_size > 10_000
    again = [*words[:-1], f"out={tmp_path / 'other'}", "block=parallel"]
    shutil.copytree(tmp_path / "run.base", tmp_path / "other.base")
    capsys.readouterr()
    assert runs.train(*again) == USAGE
    assert "block=parallel contradicts base=" in capsys.readouterr().err


def test_a_run_is_a_base_without_naming_its_shape(tmp_path, text):
    assert runs.train("tiny", "mesh=1x1", f"data={text}", "steps=1", f"out={tmp_path / 'base'}") == 0
    words = [f"base={tmp_path / 'base'}", f"data={text}", "mesh=1x1", "batch=8", "steps=1", f"out={tmp_path / 'run'}"]
    assert runs.train(*words) == 0
    assert Run.open(tmp_path / "run").config.layers == Run.open(tmp_path / "base").config.layers == 2


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("nowhere is not a run", ["base=nowhere", "data=x"]),
        ("name a preset", []),
    ],
)
def test_bases_that_are_not_there(message, words, capsys):
    assert main(["train", *words]) == USAGE
    assert message in capsys.readouterr().err
