"""A lesson: one module of `lessons/`, from which the exercise, the solution and the notebook are made.

A lesson's source has cells. Its docstring is the text. The cell `# %% dense` holds the dense function and the specs,
`# %% shard` the shard function, and `# %% checks` what only the checker uses. Lines between `# solution` and
`# hole: words` are the solution, which an exercise replaces by the words.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from shardformer.errors import UsageError

FOLDER = Path(__file__).parent / "lessons"
_CELL = re.compile(r"^# %% (\w+)\n", re.MULTILINE)
_SOLUTION = re.compile(r"^( *)# solution\n(.*?)((?:^ *# hole: [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_HOLE = re.compile(r"^ *# hole: ([^\n]*)\n", re.MULTILINE)
_TEXT = re.compile(r'\A"""(.*?)"""\n', re.DOTALL)


class Lesson(NamedTuple):
    """One lesson: its number, the path of its source, and the module of the source."""

    number: int
    path: Path
    module: ModuleType

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].rstrip(".")

    @property
    def text(self) -> str:
        match = _TEXT.match(self.path.read_text())
        assert match, self.path
        return match[1].strip()

    @property
    def cells(self) -> dict[str, str]:
        """The source by the names of its cells; the imports, which have no name, are under `setup`."""
        parts = _CELL.split(_TEXT.sub("", self.path.read_text()))
        named = {"setup": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))
        return {name: source.strip("\n") for name, source in named.items()}

    @property
    def exercise(self) -> str:
        """The file that a learner completes."""
        return self._write(open_hole(self.cells["shard"] + "\n"))

    @property
    def solution(self) -> str:
        """The exercise with the solution in its hole."""
        return self._write(close_hole(self.cells["shard"] + "\n"))

    def _write(self, shard: str) -> str:
        cells = self.cells
        commands = f"Check it with: python -m shardformer learn check lesson_{self.number}.py"
        return (
            f'"""Lesson {self.number}: {self.text}\n\n{commands}\n"""\n\n{cells["setup"]}\n\n'
            f"# %% The dense result, on one device, and how arguments and results are split.\n{cells['dense']}\n\n\n"
            f"# %% The function of one shard.\n{shard}"
        )

    @property
    def mistakes(self) -> tuple[Callable[..., Any], ...]:
        """Shard functions with a typical mistake; the docstring of each is what the checker says."""
        return getattr(self.module, "MISTAKES", ())


def open_hole(source: str) -> str:
    """Replaces the solution by the words of the hole."""

    def replace(match: re.Match) -> str:
        indent, instructions = match[1], _HOLE.findall(match[3])
        lines = [f"{indent}# YOUR TURN: {instructions[0]}", *(f"{indent}# {line}" for line in instructions[1:])]
        return "\n".join([*lines, f'{indent}raise NotImplementedError("the hole of this lesson")', ""])

    return _SOLUTION.sub(replace, source)


def close_hole(source: str) -> str:
    """Removes the marks around the solution and the words of the hole."""
    return _SOLUTION.sub(lambda match: match[2], source)


def read_lessons() -> list[Lesson]:
    """Returns every lesson, by number."""
    paths = sorted(FOLDER.glob("lesson_*.py"))
    return [read_lesson(int(path.stem.split("_")[1])) for path in paths]


def read_lesson(number: int) -> Lesson:
    """Imports one lesson."""
    paths = list(FOLDER.glob(f"lesson_{number:02d}_*.py"))
    if not paths:
        last = len(list(FOLDER.glob("lesson_*.py")))
        raise UsageError(f"there is no lesson {number}; the lessons are 1 to {last}")
    return Lesson(number, paths[0], importlib.import_module(f"shardformer.course.lessons.{paths[0].stem}"))
