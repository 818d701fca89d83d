"""The first pass of `legacy --migrate`: xmaps become shard_maps, and meshes come into scope for them."""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax

from shardformer.legacy.axis_specs import SpecTree
from shardformer.legacy.migration.edits import Edit, apply_edits, span_of, split_lines
from shardformer.legacy.migration.mesh_edits import MeshEdits
from shardformer.legacy.migration.reachable_collectives import TRANSPOSES, CollectiveUses, SourceTree
from shardformer.legacy.migration.shard_map_text import replacement
from shardformer.legacy.migration.xmap_calls import XmapCall, XmapFinder
from shardformer.legacy.source_names import import_aliases

WIDTH = 100  # of comments
NO_CALL = (
    "it imports jax.experimental.maps, which is gone, and calls no xmap by its name; leave it to `legacy SCRIPT.py`"
)


class XmapPass(NamedTuple):
    """The result of the first pass: the new text, the number of rewritten xmaps, and (line, reason) of the others."""

    migrated: str
    decided: int
    stays: list[tuple[int, str]]


def rewrite_xmaps(file: Path, source: str, home: str) -> XmapPass:
    """Rewrites the xmaps of a file, and how its meshes come into scope.

    home: the module of the helpers, as the file imports it. Raises SyntaxError if the result is not Python.
    """
    tree = ast.parse(source)
    finder = XmapFinder()
    finder.visit(tree)
    uses = _find_uses(finder.calls, SourceTree(file))
    nested = _nested(finder.calls, uses, file)
    calls = [call for call in finder.calls if id(call) not in nested]
    stays = [(undecided.node.lineno, undecided.reason) for undecided in finder.undecided]
    stays += [(call.call.lineno, nested[id(call)]) for call in finder.calls if id(call) in nested]
    around = MeshEdits(source, {id(call.call) for call in calls}, bool(stays), home)
    around.visit(tree)
    spec = _spec_name(tree)
    edits = [_edit(call, source, tree, spec, home) for call in calls]
    rewrites_meshes = bool(calls) or not (stays or around.left)
    every = [*edits, *around.edits, *around.import_edits(tree)] if rewrites_meshes else []
    if not stays and around.left:
        stays = around.left if calls else [(node.lineno, NO_CALL) for node in around.import_nodes]
    migrated = apply_edits(source, every, _comments(calls, source, tree, uses))
    ast.parse(migrated)
    return XmapPass(migrated, len(edits), stays)


def _find_uses(calls: list[XmapCall], files: SourceTree) -> dict[int, CollectiveUses]:
    result = {}
    for call in calls:
        function = call.function or call.fun
        assert function is not None, "a decorator has its function"
        result[id(call)] = files.reach(function)
    return result


def _nested(calls: list[XmapCall], uses: dict[int, CollectiveUses], file: Path) -> dict[int, str]:
    """The xmaps that reach, or are reached by, another one over a mesh: by the id of the call, with the reason."""
    result = {}
    by_location = {f"{file.name}:{call.call.lineno}": call for call in calls}
    for call in calls:
        for location in uses[id(call)].xmaps:
            inner = by_location.get(location)
            if inner is None or inner.mesh_axes:
                result[id(call)] = (
                    f"its body reaches the xmap at {location}: one shard_map over all their mesh axes serves both"
                )
                if inner is not None:
                    result[id(inner)] = f"it is reached by the xmap at {file.name}:{call.call.lineno}"
    return result


def _edit(call: XmapCall, source: str, tree: ast.Module, spec: str, home: str) -> Edit:
    text = replacement(call, source, _indent(call, source, tree), spec)
    imports = ["import jax"] if "jax." in text else []
    if call.mesh_axes:
        renamed = "" if spec == "PartitionSpec" else f" as {spec}"
        imports += [f"from jax.sharding import PartitionSpec{renamed}", f"from {home} import shard_map_over_mesh"]
    return Edit(span_of(call.call), text, tuple(imports))


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
    line = split_lines(source)[_first_line(_statement(tree, call.call)) - 1]
    return line[: len(line) - len(line.lstrip())]


def _comments(
    calls: list[XmapCall], source: str, tree: ast.Module, uses: dict[int, CollectiveUses]
) -> dict[int, list[str]]:
    """By the line of a statement, the comment in front of it."""
    comments: dict[int, list[str]] = {}
    stated: set[str] = set()
    for call in calls:
        indent = _indent(call, source, tree)
        for paragraph in _comment(call, uses[id(call)]):
            topic = re.split(r"[:=]", paragraph)[0]
            text = paragraph if paragraph not in stated else f"{topic}: as above."
            stated.add(paragraph)
            lines = textwrap.wrap(text, WIDTH - len(indent), initial_indent="# ", subsequent_indent="#   ")
            line = _first_line(_statement(tree, call.call))
            comments.setdefault(line, []).extend(indent + text for text in lines)
    return comments


def _comment(call: XmapCall, uses: CollectiveUses) -> list[str]:
    """Returns the assumptions under which the rewritten call is equal, for comments above it."""
    paragraphs = []
    if call.mesh_axes:
        pairs = ", ".join(f'"{name}" on {_mesh_axis_text(axis)}' for name, axis in call.mesh_axes.items())
        paragraphs.append(f"axis_resources: {pairs}. An axis is as long as its mesh axis, or a multiple of it.")
    if call.ignored:
        paragraphs.append(f"axis_resources: nothing defines {', '.join(map(repr, call.ignored))}: left out.")
    for what, names in _omitted(call, tuple(call.mesh_axes)):
        paragraphs.append(f"{what}: no {names}; of a result that varies along it, index 0's is taken.")
    for what, names in _omitted(call, call.vmapped):
        paragraphs.append(f"{what}: no {names}; vmap raises if the result varies along it.")
    return paragraphs + _transposes(call, uses)


def _mesh_axis_text(axis: str | tuple[str, ...]) -> str:
    return " and ".join(f'"{part}"' for part in (axis if isinstance(axis, tuple) else (axis,)))


def _omitted(call: XmapCall, names: tuple) -> list[tuple[str, str]]:
    """Returns the outputs whose spec omits some of `names`, each with the omitted names; `out_axes` for all of them."""
    entries = SpecTree(call.outputs, "out_axes").entries
    result: dict[str, list[str]] = {}
    for path, axes in entries.items():
        if omitted := ", ".join(repr(name) for name in names if name not in axes.names):
            result.setdefault(omitted, []).append(f"out_axes{jax.tree_util.keystr(path)}")
    return [
        ("out_axes" if len(paths) == len(entries) else ", ".join(paths), omitted) for omitted, paths in result.items()
    ]


def _transposes(call: XmapCall, uses: CollectiveUses) -> list[str]:
    if not call.mesh_axes:
        return []
    if not uses.gradients:
        return ["check_vma: no gradient is seen inside; if none is taken outside either, check_vma=True may do."]
    by_kind: dict[tuple[str, str], list[str]] = {}
    for collective in uses.collectives:
        by_kind.setdefault((collective.name, collective.axis), []).append(collective.place)
    clauses = [
        f"{name} over {axis} ({_first_places(places)}) to {TRANSPOSES[name][0]}{_checked(*TRANSPOSES[name])}"
        for (name, axis), places in by_kind.items()
        if TRANSPOSES[name][0]
    ]
    places = _first_places(uses.gradients)
    words = f"check_vma=False keeps xmap's transposes for the gradient at {places}: {'; '.join(clauses)}."
    if uses.xmap_transposes:
        words += f" {_first_places(uses.xmap_transposes)} bring their own, which check_vma=True refuses."
    return [words]


def _checked(unchecked: str, checked: str) -> str:
    return "" if unchecked == checked else f" [with check_vma=True: {checked}]"


def _first_places(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _first_line(statement: ast.stmt) -> int:
    """Returns the line of a statement, or of its first decorator."""
    return min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])


def _statement(tree: ast.Module, node: ast.AST) -> ast.stmt:
    """The innermost statement around a node, which comments go in front of."""
    result = tree.body[0]
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement)):
            result = statement  # ast.walk goes from the outside in
    return result
