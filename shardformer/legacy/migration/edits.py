"""Edits of a source file by the positions of its syntax tree: comments and formatting around them stay."""

import ast
import difflib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """A range of a source file, as ast counts: lines from 1, columns from 0 in UTF-8 bytes."""

    first_line: int
    first_column: int
    last_line: int
    last_column: int


@dataclass
class Edit:
    """The text that replaces a span, with the import statements, of one name each, that the text needs."""

    span: Span
    text: str
    imports: tuple[str, ...] = ()


def span_of(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt | None = None) -> Span:
    """Returns the span from the start of `first` to the end of `last`, or of `first` itself."""
    end = first if last is None else last
    assert end.end_lineno is not None, "ast.parse gives every node an end"
    assert end.end_col_offset is not None, "ast.parse gives every node an end"
    return Span(first.lineno, first.col_offset, end.end_lineno, end.end_col_offset)


def apply_edits(source: str, edits: list[Edit], comments: dict[int, list[str]] | None = None) -> str:
    """Returns the source after edits that do not overlap; `comments` by the line that they stand above."""
    lines = split_lines(source)
    for edit in sorted(edits, key=lambda edit: edit.span, reverse=True):
        first_line, first_column, last_line, last_column = edit.span
        before = lines[first_line - 1].encode()[:first_column].decode()
        after = lines[last_line - 1].encode()[last_column:].decode()
        text = before + edit.text + after
        # Later lines keep their numbers: replaced lines stay one entry, however many they are.
        lines[first_line - 1] = text if text.strip() else ""
        lines[first_line:last_line] = [""] * (last_line - first_line)
    for line, texts in (comments or {}).items():
        lines[line - 1] = "".join(f"{text}\n" for text in texts) + lines[line - 1]
    return "".join(_add_imports(split_lines("".join(lines)), edits))


def split_lines(text: str) -> list[str]:
    """Splits as Python's parser does: str.splitlines() would also split at a form feed."""
    return io.StringIO(text).readlines()


def _add_imports(lines: list[str], edits: list[Edit]) -> list[str]:
    """Adds the imports of the edits after the imports of the file, one statement for each module."""
    tree = ast.parse("".join(lines))
    wanted = {line for edit in edits for line in edit.imports}
    missing = wanted - {line for node in tree.body for line in _single_imports(node)}
    if not missing:
        return lines
    plain = sorted(line for line in missing if line.startswith("import "))
    by_module: dict[str, list[str]] = {}
    for line in sorted(missing - set(plain)):
        module, _, name = line.removeprefix("from ").partition(" import ")
        by_module.setdefault(module, []).append(name)
    # Relative imports come last, as isort has them.
    modules = sorted(by_module, key=lambda module: (module.startswith("."), module))
    added = [*plain, *(f"from {module} import {', '.join(by_module[module])}" for module in modules)]
    count = _lines_of_imports(tree)
    return [*lines[:count], *(f"{line}\n" for line in added), *lines[count:]]


def _single_imports(node: ast.stmt) -> list[str]:
    """Returns an import statement as statements of one name each."""
    if isinstance(node, ast.Import):
        return [ast.unparse(ast.Import([name])) for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [ast.unparse(ast.ImportFrom(node.module, [name], node.level)) for name in node.names]
    return []


def _lines_of_imports(tree: ast.Module) -> int:
    """Returns the number of lines up to the last import at the top of the module."""
    count = 0
    for number, statement in enumerate(tree.body):
        docstring = number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or isinstance(statement, ast.Import | ast.ImportFrom):
            count = statement.end_lineno or count
    return count


def text_of(lines: list[str], span: Span) -> str:
    """Returns the text of a span of a source, whose lines `split_lines` returned."""
    first_line, first_column, last_line, last_column = span
    if first_line == last_line:
        return lines[first_line - 1].encode()[first_column:last_column].decode()
    first = lines[first_line - 1].encode()[first_column:].decode()
    last = lines[last_line - 1].encode()[:last_column].decode()
    return "".join([first, *lines[first_line : last_line - 1], last])


def unified_patch(file: Path, before: str, after: str, is_new: bool = False) -> Iterable[str]:
    """Yields the lines of a patch for `patch -p1` or `git apply`; of a file that does not exist if `is_new`."""
    name = os.path.relpath(file)
    origin = "/dev/null" if is_new else f"a/{name}"
    for line in difflib.unified_diff(split_lines(before), split_lines(after), origin, f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
