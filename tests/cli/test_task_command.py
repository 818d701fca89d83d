"""`train task=FILE.py:NAME`: a user's module from the shell, which each start names and no run stores."""

import json
import re
from pathlib import Path

import pytest

from shardformer import Session, UsageError
from shardformer.__main__ import main
from tests import shared, tasks
from tests.tasks.small import Perceptron

FILE = Path(tasks.__file__).parent / "small.py"
TASK = f"task={FILE}:Perceptron"
KEYS = ["batch=16", "steps=4", "lr=0.05", "eval_every=2", "warmup=1", "schedule=constant", "program_cache=none"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("task") / "run"
    assert main(["train", TASK, *KEYS, "mesh=2x2", "zero=1", f"out={out}"]) == 0
    return out


def test_run_is_evaluated_at_its_end(trained):
    record = json.loads((trained / "final.json").read_text())["validation"]
    assert (record["rows"], list(record)) == (16, ["loss", "accuracy", "rows", "largest"])


def test_end_names_the_splits_that_the_task_has(trained, tmp_path, capsys):
    assert main(["train", "--resume", str(trained), "steps=5", TASK]) == 0
    assert "evaluating the best checkpoint on all of validation\n" in capsys.readouterr().out
    other = f"task={FILE}:WithoutValidation"
    assert main(["train", other, *KEYS, "mesh=2x2", f"out={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert "\nthere is no validation data to evaluate it on\n" in printed
    assert "evaluating the best checkpoint" not in printed
    assert "\nsplit " not in printed


def test_stored_run_does_not_name_the_code(trained):
    stored = json.loads((trained / "config.json").read_text())
    assert stored["objective"] == "task"
    assert "task" not in stored
    assert not [path for path in trained.rglob("*.json") if "small.py" in path.read_text()]


def test_each_start_names_the_task(trained, capsys):
    assert main(["train", "--resume", str(trained), "steps=6"]) == 2
    assert "trains a task of yours, which each start names; task takes FILE.py:NAME" in capsys.readouterr().err
    assert main(["train", "--resume", str(trained), "steps=6", TASK]) == 0
    assert (trained / "step_00000006").is_dir()


def test_evaluation_of_a_task_names_it_too(trained, capsys):
    assert main(["eval", str(trained), TASK, "mesh=1x2"]) == 0
    assert re.search(r"split +loss +accuracy +rows +largest\nvalidation ", capsys.readouterr().out)
    assert main(["eval", str(trained)]) == 2


def test_metrics_of_a_task_have_columns(trained):
    header, first, *_ = (trained / "metrics.csv").read_text().splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert row["z_loss"] == ""
    assert float(row["largest"]) > 0
    assert 0 <= float(row["accuracy"]) <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=absent.py:A"], "absent.py is not a file; task takes FILE.py:NAME, a subclass of shardformer.Task"),
        (
            ["task=absent"],
            "task takes FILE.py:NAME, a subclass of shardformer.Task or a function that returns one; got",
        ),
        ([f"task={FILE}:np"], "np is a module; name a function"),
        (["task=FILE:hk.Linear"], "got task=FILE:hk.Linear"),
        ([f"task={FILE}:Task"], "Task has no rows, batches, loss; a task has rows, batches, loss"),
        (["tiny", TASK], "tiny is a language model, which a task replaces; leave it out"),
        ([TASK, "layers=2"], "layers is a key of the language model and does nothing with a task"),
        ([TASK, "lora_rank=2"], "lora_rank is a key of the language model"),
    ],
)
def test_wrong_task_is_rejected_before_a_run_starts(tmp_path, capsys, words, message):
    assert main(["train", *words, f"out={tmp_path / 'run'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_run_of_a_task_has_no_language_model(trained, capsys):
    assert main(["sample", str(trained)]) == 2
    assert "it has no language model, which is needed here" in capsys.readouterr().err


def test_task_cannot_replace_the_model_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text(shared.tiny().to_json())
    with pytest.raises(UsageError, match="trains a language model, which task= cannot replace"):
        Session.resume(tmp_path, task=Perceptron())


def test_verification_of_a_task(capsys):
    assert main(["verify", TASK, "mesh=2x2", "batch=8", "warmup=0"]) == 0
    assert "sharded equals one device" in capsys.readouterr().out


@pytest.mark.parametrize("of_run", [False, True])
def test_show_describes_the_parameters_of_a_task(trained, capsys, of_run):
    words = [str(trained), TASK] if of_run else [TASK, *KEYS, "mesh=2x2", "zero=1"]
    assert main(["show", *words]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"~/up +8x16 .*'mp'.* 4x8", shown)
    assert "transformer" not in shown


def test_show_of_a_run_asks_for_its_task(trained, capsys):
    assert main(["show", str(trained)]) == 2
    assert "this run trains a task of yours" in capsys.readouterr().err
