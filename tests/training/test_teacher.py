"""A run of a student: it approaches its teacher, and a resume has the same teacher."""

import csv
import json

import pytest

from tests import runs

KEYS = ["tiny", "mesh=2x1", "tokenizer=bytes", "seq=32", "eval_every=6"]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """Returns the folder of a student that was stopped after 3 of 6 steps and resumed."""
    folder = tmp_path_factory.mktemp("distillation")
    words = [*KEYS, f"data={runs.text(folder)}"]
    assert runs.train(*words, "steps=6", f"out={folder}/teacher") == 0
    words = [*words, "steps=6", "objective=distill", f"teacher={folder}/teacher", f"out={folder}/student", "seed=1"]
    assert runs.train(*words, stop_after=3) == 0
    assert runs.train("--resume", f"{folder}/student") == 0
    return folder / "student"


@pytest.mark.slow
def test_student_approaches_its_teacher(student):
    with open(student / "metrics.csv", newline="") as file:
        found = [float(row["kl"]) for row in csv.DictReader(file)]
    assert len(found) >= 2
    assert found[-1] < found[0]


def test_changed_teacher_is_rejected(student, capsys):
    path = student / "teacher.json"
    path.write_text(json.dumps({"weights": "0" * 64, "step": 1}))
    assert runs.train("--resume", str(student), "steps=7") == runs.FAILED
    assert "has changed: the run started with weights of sha256 000000000000" in capsys.readouterr().err
    path.unlink()
    assert runs.train("--resume", str(student), "steps=7") == 0
