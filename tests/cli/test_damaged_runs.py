"""Runs with damaged, edited or missing files: each is named, and nothing is changed."""

import os
import pickle
import shutil
from pathlib import Path

import pytest

from shardformer.__main__ import main
from shardformer.training.run_folder import Run
from tests.runs import FAILED, USAGE
from tests.surroundings import let_fail


class Harm:
    """An object whose unpickling would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


STEP = "step_00000004/"
DAMAGE = {
    "cut arrays": (f"{STEP}arrays.npy", lambda data: data[:-100], "arrays.npy is truncated"),
    "longer arrays": (f"{STEP}arrays.npy", lambda data: data + b"x", "arrays.npy has 1 bytes after its last leaf"),
    "other arrays": (f"{STEP}arrays.npy", lambda data: b"x" * len(data), "the file is damaged"),
    "cut tree": (f"{STEP}tree.pkl", lambda data: data[:-10], "tree.pkl cannot be read"),
    "hostile tree": (f"{STEP}tree.pkl", lambda data: pickle.dumps(Harm(), 4), "needs no class or function"),
    "cut config": ("config.json", lambda data: data[:-10], "config.json is damaged"),
    "text in config": ("config.json", lambda data: data.replace(b'"seq": 16', b'"seq": ""'), "config.json is damaged"),
    "nested vocabulary": ("vocabulary.json", lambda data: b"[" * 100_000, "vocabulary.json is damaged (RecursionError"),
    "no vocabulary": ("vocabulary.json", lambda data: b"", "vocabulary.json is damaged"),
    "other vocabulary": ("vocabulary.json", lambda data: data.replace(b'"characters": "', b'"characters": "zz'),
                         "vocabulary.json is damaged"),
    "empty progress": (f"{STEP}progress.json", lambda data: b"{}", "progress.json is damaged"),
    "binary progress": (f"{STEP}progress.json", lambda data: b"\xff", "progress.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("command", [["train", "--resume", "run", "steps=6"], ["sample", "run", "tokens=2"]])
def test_damaged_run_is_named(refused, run, name, command):
    file, damage, message = DAMAGE[name]
    data = (run / file).read_bytes()
    assert damage(data) != data
    (run / file).write_bytes(damage(data))
    refused(FAILED, message, *command)


def test_conversion_of_a_damaged_tree_is_rejected(refused, run):
    """Every other command rejects it; a conversion reads the arrays one by one."""
    file, damage, message = DAMAGE["cut tree"]
    (run / file).write_bytes(damage((run / file).read_bytes()))
    refused(FAILED, message, "convert", "run", "published", "format=hf")


def test_endless_step_in_the_final_evaluation_is_left_out(run):
    (run / "final.json").write_text('{"step": Infinity}')
    assert Run.open(run)._read_final_step() == 0


EDITS = (("heads", 8, 4), ("d_model", 32, 64), ("seed", 0, 1))
COMMANDS = (["sample", "run"], ["eval", "run"], ["train", "--resume=run", "steps=6"])


@pytest.mark.parametrize(
    ("command", "key", "true", "edited"),
    [(command, *edit) for command in COMMANDS for edit in EDITS],
)
def test_hand_edited_config_is_named(refused, run, command, key, true, edited):
    path = run / "config.json"
    path.write_text(path.read_text().replace(f'"{key}": {true}', f'"{key}": {edited}'))
    message = f"run/config.json has {key}={edited}, but step_00000004 was trained with {key}={true}; set it back"
    refused(USAGE, message, *command)


def test_damaged_metrics_are_named(refused, run):
    Run.open(Path("run")).write_documents()  # stores the new path, so that the command changes nothing
    with open(run / "metrics.csv", "a") as file:
        file.write("abc\n")
    refused(FAILED, "metrics.csv, line 6, is not a row of metrics: 'abc'", "train", "--resume", "run")


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_run_without_a_checkpoint_is_named(refused, run, command):
    shutil.rmtree(run / "step_00000004")
    refused(USAGE, "run has no checkpoint yet", command, "run")


@pytest.mark.slow
def test_missing_best_checkpoint_is_named(refused, run):
    (run / STEP).rename(run / "step_00000009")
    refused(USAGE, "run has no checkpoint of step 4; there are 9", "sample", "run", "step=4")
    assert main(["sample", "run", "tokens=4"]) == 0  # from the newest, as the best is gone


def test_checkpoint_with_another_steps_name_is_named(refused, run):
    """Otherwise it would stay the newest: each resume would begin there, and later saves be pruned."""
    (run / "step_00000004").rename(run / "step_00000099")
    message = "step_00000099 holds step 4; give it its own name back: step_00000004"
    refused(USAGE, message, "train", "--resume", "run", "steps=6")


def test_settings_file_that_is_a_pipe_is_named(refused, run):
    (run / "config.json").unlink()
    os.mkfifo(run / "config.json")
    for words in (["eval", "run"], ["train", "--resume", "run"]):
        refused(FAILED, "It is a pipe or a device", *words)


def test_full_disk_is_reported(refused, monkeypatch, run):
    let_fail(monkeypatch, Run, "write_documents", OSError(28, "No space left on device"))
    refused(FAILED, "No space left on device", "train", "--resume", "run", "steps=6")
