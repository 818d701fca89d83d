"""Resume with each key changed: it is rejected in one line before anything is written, or it reaches the trainer."""

import re
import shutil

import jax
import pytest

from shardformer import Config, checkpoint, session
from shardformer.__main__ import main
from shardformer.config import FIELDS, FIXED_ON_RESUME
from shardformer.config.parsing import choices, plain_type
from shardformer.errors import UsageError
from tests import runs
from tests.surroundings import before_call

# The values of keys that take few; `other_value` makes those of the others.
VALUES = {"mesh": "2x4", "steps": 50, "accum": 2, "decay_steps": 10, "profile": "4:5", "coordinator": "localhost:1"}
VALUES |= {"epochs": 0.1, "data": "builtin", "validation": "0.1", "task": "other.py:Other"}
REJECTED = {
    "epochs": "is at step 40 already, got steps=15; give more",
    "pipeline_rounds": "pipeline_rounds does nothing without pipeline stages",
    "data": "data=builtin is not what .* was trained on",
    "validation": "so what the file holds or validation= has changed",
    "text": "text=other does nothing: ",
    "out": "out cannot change on resume: copy .* and resume the copy",
    "tracker": "tracker takes wandb, mlflow, aim, tensorboard or module:function",
    "coordinator": "several processes take coordinator=HOST:PORT .*processes=0",
    "processes": "several processes take coordinator=HOST:PORT .*processes=1",
    "task": "this run trains a language model, which task= cannot replace",
    "process_id": "several processes take coordinator=HOST:PORT .*process_id=1",
}


def other_value(key: str, value):
    """Returns a value of a key that differs from the run's."""
    kind = plain_type(FIELDS[key].type)
    if key in VALUES:
        return VALUES[key]
    if known := choices(FIELDS[key]):
        return next(choice for choice in known if choice not in (value, "fused"))  # which needs an accelerator
    if kind is bool:
        return not value
    return "other" if kind is str else kind((value or 0) / 2 + 0.25 if kind is float else (value or 0) + 1)


@pytest.fixture(scope="module")
def finished_copy(tmp_path_factory, finished_run):
    """The folder of a run that no case can spoil for other tests."""
    return shutil.copytree(finished_run, tmp_path_factory.mktemp("resumed") / "run")


@pytest.fixture
def trained(monkeypatch) -> list[Config]:
    """Records the configuration that the trainer gets, and ends the command there."""
    found = []

    def end(config, mesh):
        found.append(config)
        raise UsageError("the trainer was reached")

    before_call(monkeypatch, session, "Trainer", end)
    return found


def list_times(folder) -> dict:
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("key", FIELDS)
def test_changed_key_is_rejected_or_taken(finished_copy, trained, capsys, key):
    before = list_times(finished_copy)
    value = other_value(key, checkpoint.read_config(finished_copy).get(key))
    text = str(value).lower() if isinstance(value, bool) else value
    if key == "program_cache":  # as in a new process, which prints a line when it disables the cache
        jax.config.update("jax_enable_compilation_cache", True)
    assert main(["train", "--resume", str(finished_copy), f"{key}={text}"]) == runs.USAGE
    *said, line = capsys.readouterr().err.splitlines()
    assert len(said) == (key == "program_cache")  # a CPU keeps no programs of this mesh
    if key in FIXED_ON_RESUME:
        assert line.startswith(f"shardformer: error: {key} cannot change on resume: the run has ")
    elif key in REJECTED:
        assert re.search(REJECTED[key], line)
    elif trained:
        assert trained[0].get(key) == value
    else:  # it needs another key
        assert re.search(rf"^shardformer: error: .*\b{key}\b", line)
    assert not (trained and (key in FIXED_ON_RESUME or key in REJECTED))
    assert list_times(finished_copy) == before


def test_given_key_that_is_the_same_is_taken(finished_copy, trained):
    """The negative twin: a scheduler repeats the arguments of a preempted run."""
    config = checkpoint.read_config(finished_copy)
    main(
        [
            "train",
            "--resume",
            str(finished_copy),
            f"seed={config.training.seed}",
            f"lr={config.optimizer.lr}",
            f"mesh={config.parallel.mesh}",
        ]
    )
    assert trained[0].replace(out="") == config.replace(out="")
