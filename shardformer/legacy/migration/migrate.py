"""`legacy --migrate FILE ...`: prints a patch that turns xmaps into shard_maps, and what it could not decide."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.files import read_text
from shardformer.legacy.axis_specs import SpecTree
from shardformer.legacy.migration.edits import Edit, apply_edits, span_of, split_lines, unified_patch
from shardformer.legacy.migration.mesh_edits import MeshEdits
from shardformer.legacy.migration.reachable_collectives import TRANSPOSES, Reached, SourceTree
from shardformer.legacy.migration.shard_map_text import imports_of, replacement
from shardformer.legacy.migration.xmap_calls import XmapCall, XmapFinder
from shardformer.legacy.source_names import import_aliases

WIDTH = 110  # of comments
NO_CALL = (
    "it imports jax.experimental.maps, which is gone, and calls no xmap by its name; leave it to `legacy SCRIPT.py`"
)


class Migration(NamedTuple):
    source: str
    migrated: str
    decided: int
    undecided: list[str]  # a line with the reason for each place that stays


def migrate(files: Iterable[Path]) -> int:
    """Prints the patch of all files, for `patch -p1`, and on standard error what stays; 0 where nothing stays."""
    decided, undecided = 0, []
    for file in files:
        try:
            found = migrate_file(file)
        except (RecursionError, MemoryError):  # the parser's own limit is a MemoryError
            raise UsageError(f"{file}: it is nested too deeply to be read") from None
        sys.stdout.writelines(unified_patch(file, found.source, found.migrated))
        decided += found.decided
        undecided += found.undecided
    print(f"{decided} xmaps rewritten, {len(undecided)} places left as they are", file=sys.stderr)
    for line in undecided:
        print(f"  {line}", file=sys.stderr)
    return 1 if undecided else 0


def migrate_file(file: Path) -> Migration:
    try:
        source = read_text(file)
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file}: it is not Python 3: {error}") from None
    finder = XmapFinder()
    finder.visit(tree)
    reached = _reached(finder.calls, SourceTree(file))
    nested = _nested(finder.calls, reached, file)
    calls = [call for call in finder.calls if id(call) not in nested]
    stays = [(undecided.node.lineno, undecided.reason) for undecided in finder.undecided]
    stays += [(call.call.lineno, nested[id(call)]) for call in finder.calls if id(call) in nested]
    around = MeshEdits(source, {id(call.call) for call in calls}, beside_xmaps=bool(stays))
    around.visit(tree)
    spec = _spec_name(tree)
    edits = [_edit(call, source, tree, spec) for call in calls]
    every = [*edits, *around.edits, *around.import_edits(tree)] if calls else []
    if not stays:
        stays = around.left if calls else [(node.lineno, NO_CALL) for node in around.import_nodes]
    try:
        migrated = apply_edits(source, every, _comments(calls, source, tree, reached))
        ast.parse(migrated)
    except SyntaxError as error:
        raise UsageError(f"{file}: its patch would not be Python ({error}); please report it") from None
    lines = [f"{file}:{line}: {reason}" for line, reason in stays]
    return Migration(source, migrated, len(edits), lines)


def _reached(calls: list[XmapCall], files: SourceTree) -> dict[int, Reached]:
    return {id(call): files.reach(call.function or call.fun) for call in calls}


def _nested(calls: list[XmapCall], reached: dict[int, Reached], file: Path) -> dict[int, str]:
    """The xmaps that reach, or are reached by, another one over a mesh: by the id of the call, with the reason."""
    found = {}
    by_place = {f"{file.name}:{call.call.lineno}": call for call in calls}
    for call in calls:
        for place in reached[id(call)].xmaps:
            inner = by_place.get(place)
            if inner is None or inner.mesh_axes:
                found[id(call)] = (
                    f"its body reaches the xmap at {place}: one shard_map over all their mesh axes serves both"
                )
                if inner is not None:
                    found[id(inner)] = f"it is reached by the xmap at {file.name}:{call.call.lineno}"
    return found


def _edit(call: XmapCall, source: str, tree: ast.Module, spec: str) -> Edit:
    text, helpers = replacement(call, source, _indent(call, source, tree), spec)
    imports = [line for helper in helpers for line in imports_of(helper, spec)]
    return Edit(span_of(call.call), text, tuple(helpers), ("import jax", *imports))


def _spec_name(tree: ast.Module) -> str:
    """P, as everyone calls PartitionSpec, unless the file calls something else so."""
    bound: dict[str, str | None] = (
        {"P": None} if any(isinstance(node, ast.Name) and node.id == "P" for node in ast.walk(tree)) else {}
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= dict(import_aliases(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] = None
    return "P" if (bound.get("P", "PartitionSpec") or "").endswith("PartitionSpec") else "PartitionSpec"


def _indent(call: XmapCall, source: str, tree: ast.Module) -> str:
    line = split_lines(source)[_statement(tree, call.call).lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _comments(
    calls: list[XmapCall], source: str, tree: ast.Module, reached: dict[int, Reached]
) -> dict[int, list[str]]:
    """By the line of a statement, the comment in front of it."""
    comments: dict[int, list[str]] = {}
    told: set[str] = set()
    for call in calls:
        indent = _indent(call, source, tree)
        for paragraph in _comment(call, reached[id(call)]):
            topic = re.split(r"[:=]", paragraph)[0]
            text = paragraph if paragraph not in told else f"{topic}: as above."
            told.add(paragraph)
            lines = textwrap.wrap(text, WIDTH - len(indent), initial_indent="# ", subsequent_indent="#   ")
            comments.setdefault(_statement(tree, call.call).lineno, []).extend(indent + line for line in lines)
    return comments


def _comment(call: XmapCall, reached: Reached) -> list[str]:
    """Returns the assumptions under which the rewritten call is equal, for comments above it."""
    paragraphs = []
    if call.mesh_axes:
        pairs = ", ".join(f'"{name}" on "{axis}"' for name, axis in call.mesh_axes.items())
        paragraphs.append(f"axis_resources: {pairs}. Each device has one index: an axis is as long as its mesh axis.")
    if call.ignored:
        paragraphs.append(f"axis_resources: nothing defines {', '.join(map(repr, call.ignored))}: left out.")
    outputs = SpecTree(call.outputs, "out_axes").names
    if reduced := [name for name in call.mesh_axes if name not in outputs]:
        listed = ", ".join(map(repr, reduced))
        paragraphs.append(f"out_axes: no result has {listed}; of one that varies along it, device 0's is taken.")
    if omitted := [name for name in call.vmapped if name not in outputs]:
        paragraphs.append(
            f"out_axes: no result has {', '.join(map(repr, omitted))}; vmap raises if one varies along it."
        )
    return paragraphs + _transposes(call, reached)


def _transposes(call: XmapCall, reached: Reached) -> list[str]:
    if not call.mesh_axes:
        return []
    if not reached.gradients:
        return ["check_vma: no gradient is seen inside; if none is taken outside either, check_vma=True may do."]
    by_kind: dict[tuple[str, str], list[str]] = {}
    for collective in reached.collectives:
        by_kind.setdefault((collective.name, collective.axis), []).append(collective.place)
    told = [
        f"{name} over {axis} ({_first_places(places)}) to {TRANSPOSES[name][0]}{_checked(*TRANSPOSES[name])}"
        for (name, axis), places in by_kind.items()
        if TRANSPOSES[name][0]
    ]
    places = _first_places(reached.gradients)
    words = f"check_vma=False keeps xmap's transposes for the gradient at {places}: {'; '.join(told)}."
    if reached.own_transposes:
        words += f" {_first_places(reached.own_transposes)} bring their own, which check_vma=True refuses."
    return [words]


def _checked(kept: str, checked: str) -> str:
    return "" if kept == checked else f" [with check_vma=True: {checked}]"


def _first_places(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _statement(tree: ast.Module, node: ast.AST) -> ast.stmt:
    """The innermost statement around a node, which comments go in front of."""
    found = tree.body[0]
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement)):
            found = statement  # ast.walk goes from the outside in
    return found
