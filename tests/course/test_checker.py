"""The checker names the mistakes that learners make, and passes the solutions."""

import re
import textwrap

import pytest

from shardformer.course import checker
from shardformer.course.lesson import read_lesson, read_lessons
from shardformer.errors import UsageError
from tests.course.mistakes import MISTAKES, PARTS

HOLE = re.compile(r"^( *)# YOUR TURN: .*?raise NotImplementedError\([^\n]*\n", re.MULTILINE | re.DOTALL)
CASES = [(number, *case) for number, cases in MISTAKES.items() for case in cases]


def fill(exercise: str, sources: tuple[str, ...]) -> str:
    """Puts one source into each hole."""
    for source in sources:
        for name, part in PARTS.items():
            source = source.replace(name, part)
        exercise = HOLE.sub(lambda found, text=source: textwrap.indent(text, found[1]) + "\n", exercise, count=1)
    return exercise


def check_text(number: int, text: str, folder) -> list[str]:
    path = folder / f"lesson_{number}.py"
    path.write_text(text)
    return checker.check(read_lesson(number), checker.read_answer(path), str(path)).sentences


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=pytest.mark.slow if number > 5 else []) for number in range(1, 15)]
)
def test_solution_passes(number, tmp_path):
    assert check_text(number, read_lesson(number).solution, tmp_path) == []


@pytest.mark.parametrize("number", range(1, 15))
def test_open_hole_fails(number, tmp_path):
    (sentence,) = check_text(number, read_lesson(number).exercise, tmp_path)
    assert "the hole is still open: line" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sources", "words"), CASES)
def test_mistake_is_named(number, sources, words, tmp_path):
    sentences = check_text(number, fill(read_lesson(number).exercise, sources), tmp_path)
    assert words in " ".join(sentences)


def test_each_lesson_has_five_recorded_mistakes():
    assert len(read_lessons()) == len(MISTAKES) == 14
    assert min(map(len, MISTAKES.values())) >= 5


def test_file_that_calls_exit_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"lesson_1.py does not run: .*it calls sys\.exit\(0\)"):
        check_text(1, "import sys; sys.exit(0)", tmp_path)


def test_function_that_calls_exit_is_named(tmp_path):
    assert "on_shard calls sys.exit(0)" in check_text(1, "def on_shard(*_): raise SystemExit(0)", tmp_path)[0]
