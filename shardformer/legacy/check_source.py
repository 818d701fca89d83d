"""`legacy --check`: which removed names a source tree uses, by reading it: nothing of it is imported or run."""

import ast
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.legacy import installed_libraries, notebooks
from shardformer.legacy.removed_names import MODULES, NOT_COVERED, PROVIDERS, today
from shardformer.tables import table

# jax.config is a living object as well as a removed module: only an import tells that the module is meant.
ALSO_AN_OBJECT = "jax.config"
UNSEEN = "not seen: names in strings (getattr, exec), or passed on through variables"


class Use(NamedTuple):
    """One place that a removed name is used at, or a file that could not be read."""

    place: str
    name: str
    status: str  # covered, not covered or not read
    advice: str


def check(paths: Iterable[Path]) -> int:
    """Prints the uses of removed names in files and folders; 0 where `install()` covers all that was read."""
    paths = list(paths)
    files = [file for path in paths for file in _sources(path)]
    if not files:
        raise UsageError(f"there is no .py and no .ipynb file in {' '.join(map(str, paths))}")
    uses = [use for file in files for use in _uses_in(file)]
    if uses:
        print(table(uses, ["place", "name", "status", "today"]) + "\n")
    print(_summary(files, uses))
    return 0 if all(use.status == "covered" for use in uses) else 1


def _summary(files: list[Path], uses: list[Use]) -> str:
    named = [use for use in uses if use.status != "not read"]
    removed, missing = {use.name for use in named}, {use.name for use in named if use.status == "not covered"}
    read = _count(len(files), "file")
    parts = [f"{_count(len(named), 'use')} of {_count(len(removed), 'removed name')} in {read}"]
    if named:
        parts.append(f"{len(missing)} of them not covered: {', '.join(sorted(missing))}" if missing else "all covered")
    if len(named) < len(uses):
        parts.append(f"{_count(len(uses) - len(named), 'file or cell', 'files or cells')} not read")
    return "; ".join([*parts, UNSEEN])


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise UsageError(f"{path}: there is no such file or folder to check")
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _uses_in(file: Path) -> list[Use]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code is full of "\d"
            return (_uses_in_notebook if file.suffix == ".ipynb" else _uses_in_module)(file)
    except SyntaxError as error:
        return [_not_python(f"{file}:{error.lineno or 1}", error.msg)]
    except (OSError, ValueError, RecursionError) as error:
        return [Use(str(file), "-", "not read", str(error))]


def _uses_in_module(file: Path) -> list[Use]:
    return [Use(f"{file}:{line}", name, *_verdict(name)) for line, name in find_removed_names(file.read_bytes())]


def _uses_in_notebook(file: Path) -> list[Use]:
    notebook = notebooks.read(file.read_bytes())
    found = find_removed_names(notebook.source)
    uses = [Use(f"{file}: {notebook.places[line - 1]}", name, *_verdict(name)) for line, name in found]
    return uses + [_not_python(f"{file}: {place}", why) for place, why in notebook.broken]


def _not_python(place: str, why: str) -> Use:
    return Use(place, "-", "not read", f"not Python 3: {why}")


def _verdict(name: str) -> tuple[str, str]:
    if name in PROVIDERS:
        return "covered", today(name)
    if name in MODULES:
        return "covered", "see the names that it is used for"
    if name in NOT_COVERED:
        return "not covered", today(name)
    home = name.rpartition(".")[0]
    return (
        "not covered",
        f"{home} comes back without it" if home in MODULES else f"not in {installed_libraries.version(name)}",
    )


def find_removed_names(source: bytes | str) -> list[tuple[int, str]]:
    """The line and the dotted name of every use of a removed name, through whatever alias it was imported by."""
    tree = ast.parse(source)
    imports = _Imports()
    imports.visit(tree)
    attributes = _Attributes(imports.aliases)
    attributes.visit(tree)
    return sorted(imports.found + attributes.found)


class _Imports(ast.NodeVisitor):
    """What each imported name stands for, and the imports that are uses themselves."""

    def __init__(self):
        self.aliases: dict[str, str] = {}
        self.found: list[tuple[int, str]] = []

    def visit_Import(self, node):
        for imported in node.names:
            top = imported.name.partition(".")[0]
            self.aliases[imported.asname or top] = imported.name if imported.asname else top
            self._note(node, imported.name)

    def visit_ImportFrom(self, node):
        if node.level:
            return
        for imported in node.names:
            name = node.module if imported.name == "*" else f"{node.module}.{imported.name}"
            self.aliases[imported.asname or imported.name] = ALSO_AN_OBJECT if name == "jax.config.config" else name
            if name != ALSO_AN_OBJECT or imported.name == "*":
                self._note(node, name)

    def _note(self, node, name: str) -> None:
        removed = _removed(name)
        if removed is not None:
            self.found.append((node.lineno, removed))


class _Attributes(ast.NodeVisitor):
    """Removed names spelled as attributes of what was imported."""

    def __init__(self, aliases: dict[str, str]):
        self.aliases = aliases
        self.found: list[tuple[int, str]] = []

    def visit_Attribute(self, node):
        spelled = _dotted(node)
        if spelled is None:
            return self.generic_visit(node)
        top, _, rest = spelled.partition(".")
        if top not in self.aliases:
            return None
        imported = self.aliases[top]
        name = _removed(f"{imported}.{rest}", ALSO_AN_OBJECT)
        if name is not None and len(name) > len(imported):  # otherwise the import was the use
            self.found.append((node.lineno, name))
        return None


def _dotted(node: ast.expr) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _removed(name: str, *living: str) -> str | None:
    """The longest removed name that `name` begins with; one part more where that is a module that came back."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        start, rest = ".".join(parts[:end]), parts[end:]
        if rest and ":" not in PROVIDERS.get(start, ":"):  # a module that has another name
            return _removed(".".join([PROVIDERS[start], *rest])) or start
        if start in PROVIDERS or start in NOT_COVERED:
            return start
        if start in MODULES and start not in living:
            return ".".join(parts[: end + 1])
    return installed_libraries.missing(name)
