"""Uses of pmap that today's jax rejects: a member of an Enum as an axis name, and a result that meets one device."""

import ast

from shardformer.legacy.source_names import ScopedVisitor, ValueVisitor, dotted

AXIS_TODAY = "a str, in the collectives too: `legacy` runs it as it is"
MIXED = "jax.jit(f)(pmapped, on_one_device)"
MIXED_TODAY = "jax.device_put(pmapped, device) first: `legacy` moves them itself"


def plain_classes(tree: ast.Module) -> set[str]:
    """Returns the classes of a file whose members are no Enum's, or are strings too."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {(dotted(base) or "").rpartition(".")[2] for base in node.bases} for node in classes}
    return {name for name, of in bases.items() if not any("Enum" in base for base in of) or of & {"str", "StrEnum"}}


def names_axis_by_enum(call: ast.Call, plain: set[str]) -> bool:
    """Returns True if a pmap's axis name is a member of a class, unless the file shows that it is a string.

    A class of another file counts: trees keep such names in one file.
    """
    named = [keyword.value for keyword in call.keywords if keyword.arg == "axis_name"] or call.args[1:2]
    owners = [(dotted(axis.value) or "").rpartition(".")[2] for axis in named if isinstance(axis, ast.Attribute)]
    return any(owner[:1].isupper() and owner not in plain for owner in owners)


def mentions_pmap(tree: ast.Module) -> bool:
    """Returns True if a file uses `jax.pmap`, under whatever name it imported it; a pmap of another module is none."""
    finder = _PmapFinder()
    finder.visit(tree)
    return finder.found


class _PmapFinder(ScopedVisitor):
    def __init__(self):
        super().__init__()
        self.found = False

    def visit_Name(self, node: ast.Name | ast.Attribute):
        self.found = self.found or self.resolve(node) == "jax.pmap"
        self.generic_visit(node)

    visit_Attribute = visit_Name


def jit_of_mixed_devices(node: ast.AST, file: ValueVisitor, has_pmap: bool) -> ast.expr | None:
    """Returns the `jax.jit` of a function that gets results of a pmap together with an array on one device.

    A file shows it by a call, or by a jitted function that puts values on a device itself, in a file with a pmap.
    """
    function: ast.AST | None = node
    if not isinstance(node, ast.Call):
        jit = file.transformation("jax.jit", node)
    elif _is_called_with_mixed_devices(node, file):
        return file.transformation("jax.jit", node.func)
    else:
        jit = file.transformation("jax.jit", node)
        first = node.args[0] if node.args else None
        function = file.assigned(first.id) if isinstance(first, ast.Name) else first
    return jit if has_pmap and _puts_on_a_device(function, file) else None


def _is_called_with_mixed_devices(call: ast.Call, file: ValueVisitor) -> bool:
    mapped = len(call.args) > 1 and any(file.is_result_of("jax.pmap", argument) for argument in call.args)
    return mapped and any(_is_placed(argument, file) for argument in call.args)


def _puts_on_a_device(function: ast.AST | None, file: ValueVisitor) -> bool:
    if not isinstance(function, ast.FunctionDef | ast.Lambda):
        return False
    finder = _MoveFinder(file)
    finder.visit(function)
    return finder.found


class _MoveFinder(ValueVisitor):
    """Finds a `jax.device_put` to one of `jax.devices()` in a part of a file, which sees the names around it."""

    def __init__(self, file: ValueVisitor):
        super().__init__()
        self._scopes, self._values = [*file._scopes], [*file._values]
        self.found = False

    def visit_Call(self, node: ast.Call):
        is_move = self.resolve(node.func) == "jax.device_put" and any(map(self._is_a_device, _places(node)))
        self.found = self.found or is_move
        self.generic_visit(node)

    def _is_a_device(self, node: ast.expr) -> bool:
        place = self._value(node)
        if not isinstance(place, ast.Subscript) or isinstance(place.slice, ast.Slice):
            return False
        devices = self._value(place.value)
        return isinstance(devices, ast.Call) and self.resolve(devices.func) in ("jax.devices", "jax.local_devices")

    def _value(self, node: ast.expr) -> ast.AST | None:
        return self.assigned(node.id) if isinstance(node, ast.Name) else node


def _is_placed(node: ast.expr, file: ValueVisitor) -> bool:
    value = file.assigned(node.id) if isinstance(node, ast.Name) else node
    return isinstance(value, ast.Call) and file.resolve(value.func) == "jax.device_put" and bool(_places(value))


def _places(move: ast.Call) -> list[ast.expr]:
    """Returns where a `jax.device_put` puts its first argument, if it says so."""
    return [*move.args[1:2], *(keyword.value for keyword in move.keywords if keyword.arg == "device")]
