"""`legacy --check`: the removed names and silent changes of a source tree; nothing of it is imported or run."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.legacy import installed_libraries, missing_packages, notebooks
from shardformer.legacy.removed_uses import COVERED, NOT_PUT_BACK, find_removed_uses
from shardformer.legacy.silent_uses import Findings, find_silent_changes, relevant_uses
from shardformer.tables import escape, format_table

NOT_READ = "not read"
UNSEEN = "not seen: names in strings (getattr, exec), or passed on through variables"


class Use(NamedTuple):
    """One use of a removed name, or a file that could not be read."""

    place: str
    name: str
    status: str  # covered, not covered or not read
    advice: str


class _FileReport(NamedTuple):
    uses: list[Use]
    silent: Findings
    missing: list[tuple[int, str]]  # the line and the package
    places: list[str]  # of each line


def check(paths: Iterable[Path]) -> int:
    """Prints the uses of removed names in files and folders, and the lines that give other results today.

    Returns 0 where `install()` covers all names that were read: a silent change does not fail the check.
    """
    paths = list(paths)
    trees = [list(source_files(path)) for path in paths]
    files = [file for tree in trees for file in tree]
    if not files:
        raise UsageError(f"no .py or .ipynb file found in {' '.join(map(str, paths))}")
    reports = [[_report_on(file) for file in tree] for tree in trees]
    uses = [use for tree in reports for report in tree for use in report.uses]
    silent = [line for tree in reports for line in _silent_lines(tree)]
    if uses:
        _print_table(uses, ["place", "name", "status", "today"])
    if silent:
        _print_table(silent, ["place", "name", "since: the result; the old one"])
    if missing := _missing_packages(reports):
        _print_table(missing, ["place", "package", "not installed"])
    print(_summary(files, uses, len(silent)))
    return 0 if all(use.status == COVERED for use in uses) else 1


def _print_table(rows: Sequence[Sequence[str]], header: list[str]) -> None:
    """Prints a table without the control characters that names of files may hold."""
    print(format_table([[escape(cell) for cell in row] for row in rows], header) + "\n")


def _silent_lines(tree: list[_FileReport]) -> list[tuple[str, str, str]]:
    """Returns the location, the name and the advice of each silent change in the files of a tree."""
    relevant = relevant_uses([report.silent for report in tree])
    return [
        (report.places[use.line - 1], use.name, use.change.advice())
        for report, result in zip(tree, relevant, strict=True)
        for use in result
    ]


def _missing_packages(reports: list[list[_FileReport]]) -> list[tuple[str, str, str]]:
    """Returns the first place of each package that a tree imports and that is not installed, and how to install it."""
    first: dict[str, str] = {}
    for report in (report for tree in reports for report in tree):
        for line, package in report.missing:
            first.setdefault(package, report.places[line - 1])
    return [(place, package, missing_packages.advice(package)) for package, place in sorted(first.items())]


def _summary(files: list[Path], uses: list[Use], silent: int) -> str:
    named = [use for use in uses if use.status != NOT_READ]
    removed, missing = {use.name for use in named}, {use.name for use in named if use.status == NOT_PUT_BACK}
    read = _count(len(files), "file")
    parts = [f"{_count(len(named), 'use')} of {_count(len(removed), 'removed name')} in {read}"]
    if named:
        parts.append(f"{len(missing)} of them not covered: {', '.join(sorted(missing))}" if missing else "all covered")
    if len(named) < len(uses):
        parts.append(f"{_count(len(uses) - len(named), 'file or cell', 'files or cells')} not read")
    if silent:
        parts.append(f"{_count(silent, 'use')} with other results than jax 0.4.13's")
    if not installed_libraries.has_jax():
        parts.append("without jax, names that it still has are listed too")
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


def removed_uses_of(file: Path) -> list[Use]:
    """Returns the uses of removed names in one file or notebook."""
    return _report_on(file).uses


def _report_on(file: Path) -> _FileReport:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code is full of "\d"
            return (_report_on_notebook if file.suffix == ".ipynb" else _report_on_module)(file)
    except SyntaxError as error:
        return _unread(_not_python(f"{file}:{error.lineno or 1}", error.msg))
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # the parser's limit is a MemoryError
        return _unread(Use(str(file), "-", NOT_READ, str(error) or "it is nested too deeply"))


def _unread(use: Use) -> _FileReport:
    return _FileReport([use], find_silent_changes(""), [], [])


def _report_on_module(file: Path) -> _FileReport:
    source = file.read_bytes()
    uses = [Use(f"{file}:{use.line}", *use[1:]) for use in find_removed_uses(source)]
    places = [f"{file}:{line}" for line in range(1, source.count(b"\n") + source.count(b"\r") + 2)]
    return _FileReport(uses, find_silent_changes(source), list(missing_packages.missing_imports(source)), places)


def _report_on_notebook(file: Path) -> _FileReport:
    notebook = notebooks.read(file.read_bytes())
    places = [f"{file}: {location}" for location in notebook.places]
    uses = [Use(places[use.line - 1], *use[1:]) for use in find_removed_uses(notebook.source)]
    uses += [_not_python(f"{file}: {location}", why) for location, why in notebook.broken]
    missing = list(missing_packages.missing_imports(notebook.source))
    return _FileReport(uses, find_silent_changes(notebook.source), missing, places)


def _not_python(location: str, why: str) -> Use:
    return Use(location, "-", NOT_READ, f"not Python 3: {why}")
