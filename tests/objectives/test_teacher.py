"""A run of a student of a published model: it approaches its teacher, and a resume has the same teacher."""

import csv
import json

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.cli import base_model
from tests import runs
from tests.convert.hf_models import FOLDER

# The published table of learned positions is longer.
KEYS = ["tiny", "mesh=2x2", "zero=3", "tokenizer=ids", "vocab=61", "seq=16", "eval_every=6", "steps=6", "log_every=1"]


def convert_here(source, target, *words) -> str:
    assert main(["convert", source, str(target), *words]) == 0
    return ""


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """Returns the folder of a student that was stopped after 3 of 6 steps and resumed."""
    folder = tmp_path_factory.mktemp("distillation")
    np.random.RandomState(0).randint(0, 61, 8000).astype("<u2").tofile(folder / "ids.bin")
    words = [*KEYS, f"data={folder}/ids.bin", "objective=distill", f"teacher={FOLDER}/gpt2", f"out={folder}/student"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_model, "convert_in_process", convert_here)
        assert runs.train(*words, stop_after=3) == 0
    assert runs.train("--resume", f"{folder}/student") == 0
    return folder / "student"


def read_arrays(run) -> bytes:
    return (run / "step_00000000" / "arrays.npy").read_bytes()


@pytest.mark.slow
def test_student_approaches_its_teacher(student):
    with open(student / "metrics.csv", newline="") as file:
        found = [float(row["kl"]) for row in csv.DictReader(file)]
    assert len(found) == 6
    assert found[-1] < found[0]


@pytest.mark.slow
def test_published_teacher_is_the_run_of_its_conversion(student, tmp_path):
    """The uninterrupted student of that run has the bits of the resumed one."""
    teacher = student.with_name("student.teacher")
    convert_here(str(FOLDER / "gpt2"), tmp_path / "teacher", "seq=16")
    assert read_arrays(tmp_path / "teacher") == read_arrays(teacher)
    words = [*KEYS, f"data={student.parent}/ids.bin", "objective=distill", f"teacher={teacher}", f"out={tmp_path}/run"]
    assert runs.train(*words) == 0
    assert runs.rows(tmp_path / "run") == runs.rows(student)
    assert (tmp_path / "run" / "teacher.json").read_text() == (student / "teacher.json").read_text()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("vocab=62", "gpt2 has vocab=61 vocab_multiple=8, and the student vocab=62 vocab_multiple=8"),
        ("seq=32", "gpt2 has learned positions for seq=24, and the student seq=32; give seq=24"),
    ],
)
def test_wrong_teacher_is_rejected_before_its_conversion(word, message, tmp_path, capsys):
    others = [other for other in KEYS if other.partition("=")[0] != word.partition("=")[0]]
    words = [*others, word, "data=x", "objective=distill", f"teacher={FOLDER}/gpt2", f"out={tmp_path}/run"]
    assert runs.train(*words) == runs.USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_changed_teacher_is_rejected(student, capsys):
    path = student / "teacher.json"
    path.write_text(json.dumps({"weights": "0" * 64, "step": 1}))
    assert runs.train("--resume", str(student), "steps=7") == runs.FAILED
    assert "has changed: the run started with weights of sha256 000000000000" in capsys.readouterr().err
    path.unlink()
    assert runs.train("--resume", str(student), "steps=7") == 0
