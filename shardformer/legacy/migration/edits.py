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
    """The text that replaces a span, with the helper functions and the import lines that the text needs."""

    span: Span
    text: str
    helpers: tuple[str, ...] = ()
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
    return "".join(_add_helpers(split_lines("".join(lines)), edits))


def split_lines(text: str) -> list[str]:
    """Splits as Python's own parser does: str.splitlines() would also split at a form feed."""
    return io.StringIO(text).readlines()


def _add_helpers(lines: list[str], edits: list[Edit]) -> list[str]:
    """Adds the imports and helpers of the edits after the imports of the file."""
    helpers = list(dict.fromkeys(helper for edit in edits for helper in edit.helpers))
    wanted = {line for edit in edits for line in edit.imports}
    tree = ast.parse("".join(lines))
    present = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    missing = sorted(wanted - present, key=lambda line: (line.startswith("from"), line))
    if not missing and not helpers:
        return lines
    place = _lines_of_imports(tree)
    block = [f"{line}\n" for line in missing]
    for helper in helpers:
        block += ["\n\n", helper]
    rest = lines[place:]
    while helpers and rest and not rest[0].strip():
        rest = rest[1:]
    return [*lines[:place], *block, *(["\n\n"] if helpers and rest else []), *rest]


def _lines_of_imports(tree: ast.Module) -> int:
    """Returns the number of lines up to the last import at the top of the module."""
    place = 0
    for number, statement in enumerate(tree.body):
        docstring = number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or isinstance(statement, ast.Import | ast.ImportFrom):
            place = statement.end_lineno or place
    return place


def unified_patch(file: Path, before: str, after: str) -> Iterable[str]:
    """Yields the lines of a patch for `patch -p1` or `git apply`."""
    name = os.path.relpath(file)
    for line in difflib.unified_diff(split_lines(before), split_lines(after), f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
