"""The text of the `shard_map_over_mesh` that does what an xmap did; shard_map_helpers.py defines it."""

import ast
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from shardformer.legacy.axis_specs import is_spec
from shardformer.legacy.migration.xmap_calls import XmapCall, axis_spec

WIDTH = 100


class Group(NamedTuple):
    """Brackets around items, each a text or another group: `P(`, `"x"`, `)`."""

    opening: str
    items: tuple["Group | str", ...]
    closing: str


def lay_out(node: Group | str, indent: str, before: int = 0) -> str:
    """Returns the text; each item gets a line if the text is wider than WIDTH.

    indent: of the statement. before: columns that precede the text on its first line, without the indent.
    """
    text = _on_one_line(node)
    if isinstance(node, str) or len(indent) + before + len(text) <= WIDTH:
        return text
    inner = indent + "    "
    lines = [f"{inner}{lay_out(item, inner)},\n" for item in node.items]
    return f"{node.opening}\n{''.join(lines)}{indent}{node.closing.lstrip(',')}"


def _on_one_line(node: Group | str) -> str:
    if isinstance(node, str):
        return node
    items = ", ".join(map(_on_one_line, node.items))
    return f"{node.opening}{items}{node.closing}"


def replacement(call: XmapCall, source: str, indent: str, spec: str) -> str:
    """Returns the expression that replaces an xmap, or the decorators if the xmap was one.

    indent: of the statement. spec: the name of PartitionSpec in the file.
    """
    over_mesh = _over_mesh(call, spec) if call.mesh_axes else None
    donated = f"donate_argnums={call.donated}" if call.donated else ""
    if call.partial:
        calls = [Group(f"{call.partial}(", ("jax.vmap", *layer), ")") for layer in _vmap_layers(call)]
        if over_mesh is not None:
            calls.insert(0, Group(f"{call.partial}(", ("shard_map_over_mesh", *over_mesh), ")"))
        else:
            calls.insert(
                0, Group(f"{call.partial}(", ("jax.jit", donated), ")") if donated else Group("jax.jit", (), "")
            )
        return f"\n{indent}@".join(lay_out(each, indent, 1) for each in calls)
    before = max(0, call.call.col_offset - len(indent))
    fun: Group | str = _source(call.fun, source)
    for layer in reversed(_vmap_layers(call)):
        fun = Group("jax.vmap(", (fun, *layer), ")")
    if over_mesh is None:
        return lay_out(Group("jax.jit(", (fun, donated) if donated else (fun,), ")"), indent, before)
    return lay_out(Group("shard_map_over_mesh(", (fun, *over_mesh), ")"), indent, before)


def _over_mesh(call: XmapCall, spec: str) -> tuple[Group | str, ...]:
    axes = [f"{_quote(name)}: {_quote(axis)}" for name, axis in call.mesh_axes.items()]
    arguments: list[Group | str] = [
        _keyword("in_specs", _partition(call.inputs, call, spec)),
        _keyword("out_specs", _partition(call.outputs, call, spec)),
        f"axes={{{', '.join(axes)}}}",
    ]
    if sizes := [f"{_quote(name)}: {size}" for name, size in call.sizes.items() if name in call.mesh_axes]:
        arguments.append(f"axis_sizes={{{', '.join(sizes)}}}")
    return (*arguments, *([f"donate_argnums={call.donated}"] if call.donated else []))


def _vmap_layers(call: XmapCall) -> list[tuple[Group | str, ...]]:
    """Returns the arguments of a vmap for each axis without a mesh axis, the outermost first."""
    removed: list[Hashable] = list(call.mesh_axes)
    layers = []
    for name in call.vmapped:
        position = functools.partial(_position_text, name, tuple(removed))
        layer = [
            _keyword("in_axes", _render(call.inputs, position)),
            _keyword("out_axes", _render(call.outputs, position)),
            f"axis_name={name!r}",
            *([f"axis_size={call.sizes[name]}"] if name in call.sizes else []),
        ]
        layers.append(tuple(layer))
        removed.append(name)
    return layers


def _position_text(name: Hashable, removed: tuple, spec) -> str:
    return repr(axis_spec(spec).position(name, removed))


def _partition(specs: Any, call: XmapCall, name: str) -> Group | str:
    def partition(spec) -> str:
        placed = {position: name for name, position in axis_spec(spec).positions if name in call.mesh_axes}
        parts = [placed.get(position) for position in range(max(placed, default=-1) + 1)]
        return f"{name}({', '.join(map(_quote, parts))})"

    return _render(specs, partition)


def _render(specs: Any, leaf: Callable[[Any], str]) -> Group | str:
    """Returns a container of specs, with `leaf(spec)` for each."""
    if specs is None:
        return "None"
    if is_spec(specs):
        return leaf(specs)
    if isinstance(specs, dict):
        items = [_prefixed(f"{_quote(key)}: ", _render(value, leaf)) for key, value in specs.items()]
        return Group("{", tuple(items), "}")
    rendered = tuple(_render(item, leaf) for item in specs)
    if isinstance(specs, list):
        return Group("[", rendered, "]")
    return Group("(", rendered, ",)" if len(rendered) == 1 else ")")


def _keyword(name: str, value: Group | str) -> Group | str:
    return _prefixed(f"{name}=", value)


def _prefixed(prefix: str, value: Group | str) -> Group | str:
    return prefix + value if isinstance(value, str) else value._replace(opening=prefix + value.opening)


def _source(node: ast.expr | None, source: str) -> str:
    assert node is not None, "only a decorator lacks its function"
    text = ast.get_source_segment(source, node)
    assert text is not None, "the node is one of this source"
    return f"({text})" if isinstance(node, ast.Lambda) else text


def _quote(value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_quote, value))})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
