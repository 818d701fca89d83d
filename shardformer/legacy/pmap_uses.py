"""Uses of pmap that today's jax rejects: a member of an Enum as an axis name, and a result that meets one device."""

import ast

from shardformer.legacy.source_names import ValueVisitor, dotted

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
    return any(getattr(node, "id", getattr(node, "attr", None)) == "pmap" for node in ast.walk(tree))


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
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    chooses = any(file.resolve(call.func) in ("jax.devices", "jax.local_devices") for call in calls)
    return chooses and any(_is_placed(call, file) for call in calls)


def _is_placed(node: ast.expr, file: ValueVisitor) -> bool:
    value = file.assigned(node.id) if isinstance(node, ast.Name) else node
    if not isinstance(value, ast.Call) or file.resolve(value.func) != "jax.device_put":
        return False
    return len(value.args) > 1 or any(keyword.arg == "device" for keyword in value.keywords)
