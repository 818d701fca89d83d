"""The xmaps of a source file, as far as the file itself determines their arguments."""

import ast
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from shardformer.legacy.axis_specs import AxisSpec, SpecTree, is_spec, parse_spec
from shardformer.legacy.migration.call_rewrites import PJIT
from shardformer.legacy.source_names import ValueVisitor

XMAP = {"jax.experimental.maps.xmap", "jax._src.maps.xmap", "shardformer.xmap", "shardformer.legacy.xmap"}
MeshAxis = str | tuple[str, ...]
KEYWORDS = ("fun", "in_axes", "out_axes")


class Undecided(Exception):
    """The reason why an xmap cannot be rewritten from its file."""


@dataclass
class XmapCall:
    """One call of xmap whose arguments are known."""

    call: ast.Call
    fun: ast.expr | None  # None for a decorator: `@partial(xmap, ...)`
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None  # its definition, where the file has it
    inputs: Any  # a spec for all arguments, or a tuple with one (or a container of them) for each
    outputs: Any
    mesh_axes: dict[Hashable, MeshAxis]  # of the named axes that lie on a mesh axis each, or on two or more
    vmapped: tuple[Hashable, ...]  # the other named axes, the outermost first
    sizes: dict[Hashable, str]  # from axis_sizes, as source text
    donated: str  # donate_argnums, as source text, or ""
    ignored: list = field(default_factory=list)  # axes with resources that nothing defines
    partial: str = ""  # the source text of functools.partial, for a decorator


@dataclass
class UndecidedCall:
    node: ast.expr
    reason: str


class XmapFinder(ValueVisitor):
    """Finds the calls of xmap in a module, in the order of its lines."""

    def __init__(self):
        super().__init__()
        self.calls: list[XmapCall] = []
        self.undecided: list[UndecidedCall] = []
        self._attributes: dict[str, list[ast.expr]] = {}
        self._decorators: set[int] = set()  # the ids of the calls that were read as decorators
        self._in_pjit: set[int] = set()  # the ids of the arguments of pjit

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and self._is_partial_xmap(decorator):
                self._decorators.add(id(decorator))
                self._add(decorator, node)
        super().visit_FunctionDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call):
        if self.resolve(node.func) == PJIT:
            self._in_pjit |= {id(argument) for argument in node.args}
        if self.resolve(node.func) in XMAP:
            self._add(node)
        elif self._is_partial_xmap(node) and id(node) not in self._decorators:
            reason = "partial(xmap, ...) gets its function elsewhere; write the whole call in one place"
            self.undecided.append(UndecidedCall(node, reason))
        self.generic_visit(node)

    def _is_partial_xmap(self, node: ast.Call) -> bool:
        return self.resolve(node.func) == "functools.partial" and bool(node.args) and self.resolve(node.args[0]) in XMAP

    def _add(self, node: ast.Call, decorated: ast.FunctionDef | ast.AsyncFunctionDef | None = None):
        try:
            self.calls.append(self._understand(node, decorated))
        except (Undecided, ValueError, TypeError) as error:
            self.undecided.append(UndecidedCall(node, str(error)))

    def _understand(self, node: ast.Call, decorated: ast.FunctionDef | ast.AsyncFunctionDef | None) -> XmapCall:
        given = _arguments(node, is_decorator=decorated is not None)
        inputs, outputs = self._literal(given["in_axes"], "in_axes"), self._literal(given["out_axes"], "out_axes")
        sizes = self._items(given.get("axis_sizes"), "axis_sizes")
        resources = {name: self._mesh_axis(name, r) for name, r in self._items(given.get("axis_resources")).items()}
        inputs = tuple(inputs) if isinstance(inputs, list) and not is_spec(inputs) else inputs
        names = list(dict.fromkeys([*SpecTree(inputs, "in_axes").names, *sizes]))
        mesh_axes = {name: axis for name, axis in resources.items() if name in names and axis is not None}
        _check_mesh_axes(mesh_axes)
        if id(node) in self._in_pjit and any(name != axis for name, axis in mesh_axes.items()):
            raise Undecided("jax rejects other axis names inside of pjit; name its axes as their mesh axes")
        if unknown := [name for name in SpecTree(outputs, "out_axes").names if name not in names]:
            raise Undecided(f"out_axes has {unknown[0]!r}, which nothing defines")
        return XmapCall(
            node,
            given.get("fun"),
            decorated or self._definition(given["fun"]),
            inputs,
            outputs,
            mesh_axes,
            tuple(name for name in names if name not in mesh_axes),
            {name: ast.unparse(size) for name, size in sizes.items()},
            ast.unparse(given["donate_argnums"]) if "donate_argnums" in given else "",
            [name for name in resources if name not in names],
            ast.unparse(node.func) if decorated is not None else "",
        )

    def _mesh_axis(self, name: Hashable, resources: ast.expr) -> MeshAxis | None:
        if isinstance(resources, ast.Call):
            raise Undecided(f"{name!r} runs in {ast.unparse(resources)}: write jax.lax.map over slices of the axis")
        axes = self._literal(resources, "axis_resources")
        axes = axes if isinstance(axes, tuple) else (axes,)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def _items(self, node: ast.expr | None, what: str = "axis_resources") -> dict[Hashable, ast.expr]:
        if node is None:
            return {}
        node = self._value(node)
        if _is_dict_call(node):
            return {keyword.arg: keyword.value for keyword in node.keywords}
        pairs = _pairs(node)
        if pairs is None:
            raise Undecided(f"{what} is {ast.unparse(node)}, which is not written out")
        return {self._literal(key, what): value for key, value in pairs}

    def _literal(self, node: ast.expr, what: str):
        """The value of a literal, in which names may stand for literals that are assigned once."""
        node = self._value(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):  # [spec] * 2 + [other]
            left, right = self._literal(node.left, what), self._literal(node.right, what)
            return left * right if isinstance(node.op, ast.Mult) else left + right
        if isinstance(node, ast.Tuple | ast.List):
            return type(ast.literal_eval(_empty(node)))(self._literal(item, what) for item in node.elts)
        if _is_dict_call(node):
            return {keyword.arg: self._literal(keyword.value, what) for keyword in node.keywords}
        if (pairs := _pairs(node)) is not None:
            return {self._literal(key, what): self._literal(value, what) for key, value in pairs}
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise Undecided(f"{what} has {ast.unparse(node)}, which is not written out in this file") from None

    def _value(self, node: ast.expr) -> ast.expr:
        """Returns the expression assigned to a name, or to an attribute of self, if there is only one."""
        while isinstance(node, ast.Name) and isinstance(value := self.assigned(node.id), ast.expr):
            node = value
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            values = self._attributes.get(node.attr, [])
            return values[0] if len(values) == 1 else node
        return node

    def visit_Module(self, node: ast.Module):
        self._attributes = _attributes_of_self(node)
        super().visit_Module(node)

    def _definition(self, node: ast.expr) -> ast.FunctionDef | ast.Lambda | None:
        result = self.assigned(node.id) if isinstance(node, ast.Name) else node
        return result if isinstance(result, ast.FunctionDef | ast.Lambda) else None


def _attributes_of_self(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Returns all that the file assigns to each attribute of self; an expression that has names can mean anything."""
    result: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            result.setdefault(node.attr, []).append(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            has_names = any(isinstance(inner, ast.Name) for inner in ast.walk(node.value))
            if not has_names and len(node.targets) == 1 and target in result.get(target.attr, []):
                result[target.attr][result[target.attr].index(target)] = node.value
    return result


def _arguments(node: ast.Call, is_decorator: bool) -> dict[str, ast.expr]:
    """Returns the arguments of a call of xmap, or of a partial application that decorates a function."""
    if any(isinstance(argument, ast.Starred) for argument in node.args) or None in [k.arg for k in node.keywords]:
        raise Undecided("its arguments are passed on with * or **; write them out")
    if is_decorator and len(node.args) > 1:
        raise Undecided("partial(xmap, ...) has positional arguments, which come before the function; name them")
    given = {} if is_decorator else dict(zip(KEYWORDS, node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    if absent := [name for name in KEYWORDS if name not in given and not (is_decorator and name == "fun")]:
        raise Undecided(f"it has no {', '.join(absent)}")
    return given


def _is_dict_call(node: ast.expr) -> TypeGuard[ast.Call]:
    """Returns True for `dict(name=value, ...)`."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "dict" or node.args:
        return False
    return all(keyword.arg for keyword in node.keywords)


def _pairs(node: ast.expr) -> list[tuple[ast.expr, ast.expr]] | None:
    """Returns the keys and values of a dict display; None for any other expression, and for `{**other}`."""
    if not isinstance(node, ast.Dict):
        return None
    pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    return pairs if len(pairs) == len(node.keys) else None


def axis_spec(spec, what: str = "a spec") -> AxisSpec:
    return parse_spec(spec, what)


def _check_mesh_axes(mesh_axes: dict[Hashable, Any]):
    owners: dict[str, str] = {}
    for name, axis in mesh_axes.items():
        for part in axis if isinstance(axis, tuple) else (axis,):
            if not isinstance(part, str) or not isinstance(name, str):
                raise Undecided(f"{name!r} lies on {part!r}: the axes of a mesh have strings for names")
            if part in owners:
                raise Undecided(f"{owners[part]!r} and {name!r} both lie on {part!r}: give each its own mesh axis")
            owners[part] = name


def _empty(node: ast.Tuple | ast.List) -> ast.Tuple | ast.List:
    return type(node)([], ast.Load())
