"""`legacy --check`: which removed names a source tree uses, by reading it: nothing of it is imported or run."""

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.legacy import notebooks
from shardformer.legacy.removed_uses import COVERED, NOT_PUT_BACK, find_removed_uses
from shardformer.tables import format_table

NOT_READ = "not read"
UNSEEN = "not seen: names in strings (getattr, exec), or passed on through variables"


class Use(NamedTuple):
    """One place where a removed name is used, or a file that could not be read."""

    place: str
    name: str
    status: str  # covered, not covered or not read
    advice: str


def check(paths: Iterable[Path]) -> int:
    """Prints the uses of removed names in files and folders; 0 where `install()` covers all that was read."""
    paths = list(paths)
    files = [file for path in paths for file in source_files(path)]
    if not files:
        raise UsageError(f"no .py or .ipynb file found in {' '.join(map(str, paths))}")
    uses = [use for file in files for use in _uses_in(file)]
    if uses:
        print(format_table(uses, ["place", "name", "status", "today"]) + "\n")
    print(_summary(files, uses))
    return 0 if all(use.status == COVERED for use in uses) else 1


def _summary(files: list[Path], uses: list[Use]) -> str:
    named = [use for use in uses if use.status != NOT_READ]
    removed, missing = {use.name for use in named}, {use.name for use in named if use.status == NOT_PUT_BACK}
    read = _count(len(files), "file")
    parts = [f"{_count(len(named), 'use')} of {_count(len(removed), 'removed name')} in {read}"]
    if named:
        parts.append(f"{len(missing)} of them not covered: {', '.join(sorted(missing))}" if missing else "all covered")
    if len(named) < len(uses):
        parts.append(f"{_count(len(uses) - len(named), 'file or cell', 'files or cells')} not read")
    return "; ".join([*parts, UNSEEN])


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def source_files(path: Path, endings: tuple[str, ...] = (".py", ".ipynb")) -> Iterator[Path]:
    """Yields a file itself, or the files of a folder with one of the endings."""
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise UsageError(f"{path}: no such file or folder")
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        sources = (Path(folder, name) for name in sorted(files) if name.endswith(endings))
        yield from (source for source in sources if source.is_file())  # reading a pipe may never end


def _uses_in(file: Path) -> list[Use]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code is full of "\d"
            return (_uses_in_notebook if file.suffix == ".ipynb" else _uses_in_module)(file)
    except SyntaxError as error:
        return [_not_python(f"{file}:{error.lineno or 1}", error.msg)]
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # the parser's own limit is a MemoryError
        return [Use(str(file), "-", NOT_READ, str(error) or "it is nested too deeply")]


def _uses_in_module(file: Path) -> list[Use]:
    return [Use(f"{file}:{use.line}", *use[1:]) for use in find_removed_uses(file.read_bytes())]


def _uses_in_notebook(file: Path) -> list[Use]:
    notebook = notebooks.read(file.read_bytes())
    found = find_removed_uses(notebook.source)
    uses = [Use(f"{file}: {notebook.places[use.line - 1]}", *use[1:]) for use in found]
    return uses + [_not_python(f"{file}: {place}", why) for place, why in notebook.broken]


def _not_python(place: str, why: str) -> Use:
    return Use(place, "-", NOT_READ, f"not Python 3: {why}")
