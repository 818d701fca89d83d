"""The meaning of the names in a source file: imports and aliases, followed through Python's scopes."""

import ast
import collections
from collections.abc import Iterator

from shardformer.legacy.call_arguments import Resolver

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class ScopedVisitor(ast.NodeVisitor):
    """Visits a tree and knows, at every node, which dotted name of a library a name was imported as."""

    def __init__(self):
        self._scopes: list[dict[str, str | None]] = []  # the innermost last; None hides an outer import

    def visit_Module(self, node: ast.Module):
        self._visit_in_scope(node.body, _bindings(node.body))

    def visit_ClassDef(self, node: ast.ClassDef):
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        # Methods do not see the names of the class, but a class rarely imports: its names hide nothing in them.
        self._visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        self._visit_all([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults, *_annotations(node)])
        hidden = dict.fromkeys(_parameters(arguments))
        self._visit_in_scope(node.body, hidden | _bindings(node.body))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda):
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._visit_in_scope([node.body], dict.fromkeys(_parameters(node.args)))

    def _visit_comprehension(self, node: COMPREHENSIONS):
        targets = [target for generator in node.generators for target in ast.walk(generator.target)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        self._visit_in_scope(list(ast.iter_child_nodes(node)), dict.fromkeys(names))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _visit_in_scope(self, nodes: list, bindings: dict[str, str | None]):
        self._scopes.append(bindings)
        self._visit_all(nodes)
        self._scopes.pop()

    def _visit_all(self, nodes: list):
        for node in nodes:
            if node is not None:
                self.visit(node)

    def imported(self, name: str) -> str | None:
        """Returns the dotted name that `name` was imported as; None if it was not imported."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def resolve(self, node: ast.expr) -> str | None:
        """Returns the dotted name of an expression such as `jnp.sum`; None if it does not come from an import."""
        spelled = dotted(node)
        if spelled is None:
            return None
        top, dot, rest = spelled.partition(".")
        base = self.imported(top)
        return None if base is None else f"{base}{dot}{rest}"


class ValueVisitor(ScopedVisitor):
    """Knows as well what a name was assigned, where a scope says it once."""

    def __init__(self):
        super().__init__()
        self._values: list[dict[str, list[ast.AST]]] = []

    def _visit_in_scope(self, nodes: list, bindings: dict):
        # Whatever else a scope binds (a parameter, the target of a loop) hides what an outer scope assigned.
        self._values.append({name: [] for name in bindings} | _values(nodes))
        super()._visit_in_scope(nodes, bindings)
        self._values.pop()

    def assigned(self, name: str) -> ast.AST | None:
        """Returns the expression that a name was assigned, or the function that it names.

        An expression that depends on the name itself, as in `x = f(x)`, is not known.
        """
        value = self._assigned_once(name)
        return None if value is not None and self._depends_on(value, name) else value

    def is_result_of(self, transform: str, node: ast.expr) -> bool:
        """Returns True for the result of a function that was transformed, by a call or a decorator."""
        value = self.assigned(node.id) if isinstance(node, ast.Name) else node
        return isinstance(value, ast.Call) and self.is_transformed_by(transform, value.func)

    def is_transformed_by(self, transform: str, node: ast.expr) -> bool:
        return self.transformation(transform, node) is not None

    def transformation(self, transform: str, node: ast.AST) -> ast.expr | None:
        """Returns the expression that names `transform` where a function was transformed; None if it was not."""
        function = self.assigned(node.id) if isinstance(node, ast.Name) else node
        if isinstance(function, ast.Call):
            return function.func if self.resolve(function.func) == transform else None
        decorators = function.decorator_list if isinstance(function, ast.FunctionDef) else []
        parts = [part for each in decorators for part in function_and_arguments(each)]
        return next((part for part in parts if self.resolve(part) == transform), None)

    def _assigned_once(self, name: str) -> ast.AST | None:
        result = next((scope[name] for scope in reversed(self._values) if name in scope), [])
        return result[0] if len(result) == 1 else None

    def _depends_on(self, value: ast.AST, name: str) -> bool:
        pending: list[ast.AST | None] = [value]
        seen: set[str] = set()
        while pending:
            node = pending.pop()
            if node is None or isinstance(node, FUNCTIONS):
                continue
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - seen
            if name in names:
                return True
            seen |= names
            pending += map(self._assigned_once, names)
        return False


def dotted(node: ast.expr) -> str | None:
    """'a.b.c' for an expression of attributes; None for any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def import_aliases(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The local name and the dotted name of everything that an import binds; of `import *`, its module as '*'."""
    for imported in node.names:
        if isinstance(node, ast.Import):
            top = imported.name.partition(".")[0]
            yield (imported.asname, imported.name) if imported.asname else (top, top)
        elif not node.level and node.module is not None:
            name = node.module if imported.name == "*" else f"{node.module}.{imported.name}"
            yield imported.asname or imported.name, name


def _bindings(body: list) -> dict[str, str | None]:
    """The names that a scope binds: imports to their dotted names, everything else to None."""
    bound: dict[str, str | None] = {}
    imports: dict[str, str] = {}
    outer: set[str] = set()
    for node in scope_nodes(body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= dict(import_aliases(node))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer |= set(node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = None
    # A name that is imported and assigned (`try: import jax; except ImportError: jax = None`) counts as imported.
    return {name: value for name, value in (bound | imports).items() if name not in outer}


def scope_nodes(body: list) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the functions and classes in it."""
    pending = list(body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, FUNCTIONS | ast.ClassDef | COMPREHENSIONS):
            pending += ast.iter_child_nodes(node)


def _parameters(arguments: ast.arguments) -> list[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in every if argument is not None]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr | None]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [node.returns, *(argument.annotation for argument in every if argument is not None)]


def unevaluated_annotations(tree: ast.Module) -> set[ast.AST]:
    """Returns the nodes in annotations that Python skips: of a function's variables; of all, if __future__ asks."""
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    every = any(imported.name == "annotations" for node in future for imported in node.names)
    skipped: list[ast.AST | None] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped += [node.annotation for node in scope_nodes(function.body) if isinstance(node, ast.AnnAssign)]
            skipped += _annotations(function) if every else []
    if every:
        skipped += [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return {part for node in skipped if node is not None for part in ast.walk(node)}


def _values(nodes: list) -> dict[str, list[ast.AST]]:
    """By name, everything that a scope assigns to it, and the functions that it defines; nothing for a name that is
    stored to in another way as well (the target of a loop, a part of a tuple, +=).
    """
    result: dict[str, list[ast.AST]] = {}
    stores: collections.Counter[str] = collections.Counter()
    assignments: collections.Counter[str] = collections.Counter()
    for node in scope_nodes(nodes):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            result.setdefault(node.targets[0].id, []).append(node.value)
            assignments[node.targets[0].id] += 1
        elif isinstance(node, ast.FunctionDef):
            result.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stores[node.id] += 1
    return result | {name: [] for name, count in stores.items() if count > assignments[name]}


GRADIENT_NAMES = ("grad", "value_and_grad", "vjp", "linearize", "linear_transpose", "jacrev", "jacobian", "hessian")
GRADIENTS = {f"jax.{name}" for name in GRADIENT_NAMES}
# Derivatives that need no transpose, and those of haiku: with GRADIENTS, all that differentiate their first argument.
DERIVATIVES = GRADIENTS | {"jax.jvp", "jax.jacfwd", "haiku.grad", "haiku.value_and_grad"}


def calls_within(function: ast.AST | None, file: Resolver) -> Iterator[tuple[ast.Call, str]]:
    """Yields each call that a function reaches, with the dotted name of the called function or "".

    A mentioned name of the same file counts as a call; other files are not read.
    """
    pending, seen = [function], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                yield inner, file.resolve(inner.func) or ""
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                pending.append(file.assigned(inner.id))


def function_and_arguments(decorator: ast.expr) -> list[ast.expr]:
    """Returns the function of `@f` and `@f(...)`, and the arguments of the latter: `@partial(f, ...)`."""
    return [decorator.func, *decorator.args] if isinstance(decorator, ast.Call) else [decorator]
