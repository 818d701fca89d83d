"""`learn`: the lessons of the course, and the checker of what a learner writes."""

import hashlib
import json
import textwrap
from pathlib import Path

import jax

from shardformer import files
from shardformer.course import checker, glossary, notebook
from shardformer.course.lesson import Lesson, read_lesson, read_lessons
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.tables import format_table

DEVICES = 8
PROGRESS = Path("lessons_learned.json")  # in the current folder: {number: hash of the file that passed}


def learn(arguments: list[str]) -> int:
    """Lists the lessons, writes one, or checks one; returns 1 if the checked file is wrong."""
    if not arguments:
        print(list_lessons())
        return 0
    first, rest = arguments[0], arguments[1:]
    if first == "glossary" and not rest:
        print(glossary.format_glossary())
    elif first == "check" and len(rest) == 1:
        return check(Path(rest[0]))
    elif first == "solution" and len(rest) == 1:
        print(read_lesson(_parse_number(rest[0])).solution, end="")
    elif first == "notebooks" and len(rest) == 1:
        for path in notebook.write_notebooks(read_lessons(), Path(rest[0])):
            print(path)
    elif first.isdigit() and not rest:
        write_exercise(read_lesson(int(first)))
    else:
        raise UsageError(
            f"learn {' '.join(arguments)} is not understood; expected nothing, a number, check FILE, solution NUMBER, "
            "glossary, or notebooks FOLDER"
        )
    return 0


def list_lessons() -> str:
    """Returns the table of lessons, with a mark on each that passed in the current folder."""
    passed = _read_progress()
    rows = []
    for lesson in read_lessons():
        path = exercise_path(lesson)
        state = "passed" if str(lesson.number) in passed else "begun" if path.exists() else ""
        rows.append([lesson.number, lesson.title, state])
    table = format_table(rows, ["", "lesson", "here"])
    return (
        f"{table}\n\n`python -m shardformer learn 1` writes lesson_1.py here, `... learn check lesson_1.py` checks it, "
        "`... learn glossary` explains words"
    )


def exercise_path(lesson: Lesson) -> Path:
    return Path(f"lesson_{lesson.number}.py")


def write_exercise(lesson: Lesson) -> None:
    """Writes the exercise into the current folder; a file that exists is kept."""
    path = exercise_path(lesson)
    if path.exists():
        raise UsageError(f"{path} exists, and may hold your work; move it away to get the lesson again")
    path.write_text(lesson.exercise, encoding="utf-8")
    print(f"{lesson.text}\n\nwrote {path}; fill its hole, then: python -m shardformer learn check {path}")


def check(path: Path) -> int:
    """Checks a learner's file on eight CPU devices and prints the verdict."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file; `learn 1` writes lesson_1.py here")
    lesson = read_lesson(_parse_number(path.stem.rpartition("_")[2]))
    jax.config.update("jax_platforms", "cpu")  # the lessons need eight devices, and no speed
    mesh.use_cpu_devices(DEVICES)
    verdict = checker.check(lesson, checker.read_answer(path), str(path))
    for picture in verdict.pictures:
        print(picture)
    if verdict.passes:
        _keep_progress(lesson, path)
        following = f"; next: learn {lesson.number + 1}" if lesson.number < len(read_lessons()) else ""
        print(f"lesson {lesson.number} is right on every mesh{following}")
        return 0
    for sentence in verdict.sentences:
        print(textwrap.fill(sentence, 100, break_on_hyphens=False, break_long_words=False))
    return 1


def _parse_number(word: str) -> int:
    if not word.isdigit():
        raise UsageError(f"{word} is not the number of a lesson; expected a name such as lesson_3.py, or 3")
    return int(word)


def _read_progress() -> dict[str, str]:
    try:
        result = json.loads(PROGRESS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _keep_progress(lesson: Lesson, path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with files.replacing(PROGRESS) as temporary:
        temporary.write_text(json.dumps(_read_progress() | {str(lesson.number): digest}), encoding="utf-8")
