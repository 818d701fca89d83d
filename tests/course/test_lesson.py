"""The exercise, the solution and the notebook of a lesson come from one source."""

import json
from pathlib import Path

import pytest

from shardformer.course import notebook
from shardformer.course.lesson import close_hole, open_hole, read_lesson, read_lessons
from shardformer.errors import UsageError

SOURCE = """\
def on_shard(x):
    # solution
    y = x
    # hole: Sum x.
    # hole: Over mp.
    return y
"""
FOLDER = Path(__file__).parents[2] / "scripts" / "course"


def test_hole_replaces_the_solution_by_its_words():
    assert open_hole(SOURCE) == (
        "def on_shard(x):\n    # YOUR TURN: Sum x.\n    # Over mp.\n"
        '    raise NotImplementedError("the hole of this lesson")\n    return y\n'
    )


def test_solution_has_no_marks():
    assert close_hole(SOURCE) == "def on_shard(x):\n    y = x\n    return y\n"


@pytest.mark.parametrize("lesson", read_lessons(), ids=lambda lesson: lesson.title)
def test_exercise_holds_neither_solution_nor_mistakes(lesson):
    assert "YOUR TURN" in lesson.exercise
    assert not {"# solution", "# hole", "MISTAKES"} & set(lesson.exercise.splitlines())
    assert "# hole" not in lesson.solution
    compile(lesson.exercise, "exercise", "exec")


def test_unknown_lesson_is_rejected():
    with pytest.raises(UsageError, match="the lessons are 1 to 14"):
        read_lesson(15)


@pytest.mark.parametrize("lesson", read_lessons(), ids=lambda lesson: lesson.title)
def test_notebook_follows_the_lesson(lesson):
    """`python -m shardformer learn notebooks scripts/course` writes them again."""
    assert (FOLDER / f"{lesson.path.stem}.ipynb").read_text() == notebook.write_notebook(lesson)


def code_of(lesson) -> list[str]:
    cells = json.loads(notebook.write_notebook(lesson))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("lesson", read_lessons(), ids=lambda lesson: lesson.title)
def test_notebook_executes(lesson, capsys):
    _, dense, shard, check = code_of(lesson)  # the first cell sets the devices of a new process
    for source, words in ((shard, "the hole is still open"), (close_hole(lesson.cells["shard"] + "\n"), "is right")):
        names: dict = {}
        for cell in (dense, source, check):
            exec(cell, names)
        assert words in capsys.readouterr().out
