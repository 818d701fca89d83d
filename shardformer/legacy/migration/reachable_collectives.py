"""The collectives that an xmapped function reaches, in its file and in the files next to it that it imports."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardformer.legacy.migration.xmap_calls import XMAP
from shardformer.legacy.source_names import GRADIENTS, ScopedVisitor, import_aliases

# What the transpose of a collective is under xmap, which check_vma=False keeps, and under check_vma=True.
TRANSPOSES = {
    "psum": ("psum", "no collective: the cotangent is the same on all devices"),
    "pmean": ("pmean", "a division by the size of the axis"),
    "all_gather": ("psum_scatter", "psum_scatter"),
    "psum_scatter": ("all_gather", "all_gather"),
    "ppermute": ("ppermute back", "ppermute back"),
    "pshuffle": ("ppermute back", "ppermute back"),
    "all_to_all": ("all_to_all back", "all_to_all back"),
    "pdot": ("the dot product's own, without a sum", "none: write einsum and psum"),
    "pmax": ("", ""),  # has no gradient
    "pmin": ("", ""),
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Collective(NamedTuple):
    place: str  # file:line
    name: str
    axis: str  # its axis names, as source text


class CollectiveUses(NamedTuple):
    collectives: list[Collective]
    gradients: list[str]  # locations where a gradient is computed
    xmap_transposes: list[str]  # locations of functions with a custom_vjp
    xmaps: list[str]  # locations where another xmap is called


class SourceTree:
    """The modules next to a file, read as far as names lead to them."""

    def __init__(self, file: Path):
        self.file = file
        self._modules: dict[Path, _Module | None] = {}

    def reach(self, function: ast.AST) -> CollectiveUses:
        """Returns all that a function of the file reaches by the names that it mentions.

        A mentioned name counts as a call. Attributes of objects and files elsewhere are not followed.
        """
        start = self.module(self.file)
        assert start is not None, "the migrated file was parsed before"
        pending, seen = [(start, start.same_node(function))], set()
        result: list[CollectiveUses] = []
        while pending:
            module, node = pending.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            result.append(module.facts(node))
            for name, is_attribute in module.names_mentioned(node):
                pending += self._definitions(module, node, name, is_attribute)
        return CollectiveUses(
            sorted({each for facts in result for each in facts.collectives}),
            sorted({each for facts in result for each in facts.gradients}),
            sorted({each for facts in result for each in facts.xmap_transposes}),
            sorted({each for facts in result for each in facts.xmaps}),
        )

    def _definitions(self, module: "_Module", node: ast.AST, name: str, is_attribute: bool) -> Iterator[tuple]:
        if name in module.definitions:
            for result in module.definitions[name]:
                if module.is_visible(result, node, is_attribute):
                    yield module, result
        elif name in module.imports and not is_attribute:
            home, _, imported = module.imports[name].rpartition(".")
            other = self.module(self._path(home)) if home else None
            if other is not None:
                yield from ((other, result) for result in other.definitions.get(imported, []))

    def module(self, path: Path | None) -> "_Module | None":
        if path is None:
            return None
        if path not in self._modules:
            try:
                self._modules[path] = _Module(path)
            except (OSError, SyntaxError, ValueError):
                self._modules[path] = None
        return self._modules[path]

    def _path(self, module: str) -> Path | None:
        """Returns the file of a module in one of the folders above the migrated file."""
        parts = module.split(".")
        for folder in self.file.resolve().parents[:4]:
            for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if path.is_file():
                    return path
        return None


class _Module:
    def __init__(self, path: Path):
        self.path = path
        self.tree = ast.parse(path.read_bytes())
        self.definitions: dict[str, list[Definition]] = {}
        self.imports: dict[str, str] = {}
        self._enclosing: dict[int, list[ast.AST]] = {}  # by node, the functions and classes around it
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions.setdefault(node.name, []).append(node)
                for inner in ast.walk(node):
                    if inner is not node:
                        self._enclosing.setdefault(id(inner), []).append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports |= dict(import_aliases(node))
        self._finder = _FactFinder(path, self.tree)
        self._finder.visit(self.tree)

    def same_node(self, node: ast.AST) -> ast.AST:
        """Returns this tree's counterpart of a node from another parse of the file."""
        return next(result for result in ast.walk(self.tree) if _place(result) == _place(node))

    def is_visible(self, definition: Definition, node: ast.AST, is_attribute: bool) -> bool:
        """Returns True if a name in `node` can refer to a definition: attributes to methods, others by scope."""
        around = self._enclosing.get(id(definition), [])
        if is_attribute:
            return bool(around) and isinstance(around[-1], ast.ClassDef) and not definition.name.startswith("__")
        if around and isinstance(around[-1], ast.ClassDef):
            return False
        defined = {id(result) for result in (*self._enclosing.get(id(node), []), *ast.walk(node))}
        return all(id(result) in defined for result in around if not isinstance(result, ast.ClassDef))

    def names_mentioned(self, node: ast.AST) -> set[tuple[str, bool]]:
        """Returns each name in `node`, and True if an attribute has it."""
        result = {(inner.id, False) for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return result | {(inner.attr, True) for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}

    def facts(self, node: ast.AST) -> CollectiveUses:
        inside = {id(result) for result in ast.walk(node)}
        return CollectiveUses(*([fact for origin, fact in part if id(origin) in inside] for part in self._finder.uses))


class _FactFinder(ScopedVisitor):
    def __init__(self, path: Path, tree: ast.Module):
        super().__init__()
        self.path = path
        self.uses: tuple[list, list, list, list] = ([], [], [], [])
        self._parts_of_rules = _parts_of_own_transposes(tree)
        self._in_rule = 0

    def visit_Call(self, node: ast.Call):
        name = self.resolve(node.func) or ""
        operator = name.removeprefix("jax.lax.")
        location = f"{self.path.name}:{node.lineno}"
        if name != operator and operator in TRANSPOSES and not self._in_rule:
            self.uses[0].append((node, Collective(location, operator, _axis_of(node, operator))))
        elif name in GRADIENTS:
            self.uses[1].append((node, location))
        elif name in XMAP:
            self.uses[3].append((node, location))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [inner for decorator in node.decorator_list for inner in ast.walk(decorator)]
        has_rule = any(self.resolve(inner) == "jax.custom_vjp" for inner in decorators if isinstance(inner, ast.expr))
        if has_rule:
            self.uses[2].append((node, f"{node.name} ({self.path.name}:{node.lineno})"))
        part_of_rule = has_rule or node.name in self._parts_of_rules
        self._in_rule += part_of_rule
        super().visit_FunctionDef(node)
        self._in_rule -= part_of_rule


def _place(node: ast.AST) -> tuple:
    return type(node), getattr(node, "lineno", None), getattr(node, "col_offset", None)


def _parts_of_own_transposes(tree: ast.Module) -> set[str]:
    """Returns the functions that `f.defvjp(forward, backward)` names."""
    rules: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "defvjp":
            rules += node.args
    return {argument.id for argument in rules if isinstance(argument, ast.Name)}


def _axis_of(call: ast.Call, operator: str) -> str:
    position = 2 if operator == "pdot" else 1
    named = [keyword.value for keyword in call.keywords if keyword.arg == "axis_name"]
    axis = [*call.args[position : position + 1], *named]
    return ast.unparse(axis[0]) if axis else "?"
