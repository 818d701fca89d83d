"""`learn` from the first list to a passed lesson, as a learner does it."""

import json

import pytest

from shardformer.__main__ import main
from shardformer.course.lesson import read_lesson


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_learner_passes_a_lesson(folder, capsys):
    assert main(["learn", "3"]) == 0
    assert "wrote lesson_3.py" in capsys.readouterr().out
    assert main(["learn", "check", "lesson_3.py"]) == 1
    assert "the hole is still open" in capsys.readouterr().out
    (folder / "lesson_3.py").write_text(read_lesson(3).solution)
    assert main(["learn", "check", "lesson_3.py"]) == 0
    shown = capsys.readouterr().out
    assert "all-reduce over mp" in shown
    assert "[ 0]===[ 1]===[ 2]===[ 3]" in shown
    assert list(json.loads((folder / "lessons_learned.json").read_text())) == ["3"]
    assert main(["learn"]) == 0
    assert "The bias and the residual" in (row := capsys.readouterr().out.splitlines()[3])
    assert row.endswith("passed")


def test_work_is_not_overwritten(folder, capsys):
    (folder / "lesson_1.py").write_text("mine")
    assert main(["learn", "1"]) == 2
    assert "exists" in capsys.readouterr().err
    assert (folder / "lesson_1.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["99"], "the lessons are 1 to 14"),
        (["check", "missing.py"], "missing.py is not a file"),
        (["chek", "x"], "learn chek x is not understood"),
        (["solution", "two"], "two is not the number of a lesson"),
    ],
)
def test_wrong_arguments_are_rejected(words, message, capsys):
    assert main(["learn", *words]) == 2
    assert message in capsys.readouterr().err


def test_file_that_does_not_run_is_named_with_its_line(folder, capsys):
    (folder / "lesson_2.py").write_text("import jax\nx = 1 / 0\n")
    assert main(["learn", "check", "lesson_2.py"]) == 2
    assert "line 2 raises ZeroDivisionError" in capsys.readouterr().err


def test_glossary_has_pictures(capsys):
    assert main(["learn", "glossary"]) == 0
    assert "[a]->[b]->[c]->[d]" in capsys.readouterr().out


def test_solution_and_notebooks_are_written(folder, capsys):
    assert main(["learn", "solution", "3"]) == 0
    assert capsys.readouterr().out == read_lesson(3).solution
    assert main(["learn", "notebooks", "course"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list((folder / "course").glob("*.ipynb"))) == 14
