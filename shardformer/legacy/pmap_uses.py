"""Uses of pmap that today's jax rejects: a member of an Enum as an axis name, and a result that meets one device."""

import ast

from shardformer.legacy.source_names import ValueVisitor, dotted

AXIS_TODAY = "a str, in the collectives too: `legacy` runs it as it is"
MIXED = "jax.jit(f)(pmapped, on_one_device)"
MIXED_TODAY = "jax.device_put(pmapped, device) first: jax.jit takes arrays of the same devices"


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


def mixes_devices(call: ast.Call, file: ValueVisitor) -> bool:
    """Returns True if a jitted function gets a pmap's result and an array that was put on a device."""
    if len(call.args) < 2 or not file.is_transformed_by("jax.jit", call.func):
        return False
    mapped = any(file.is_result_of("jax.pmap", argument) for argument in call.args)
    return mapped and any(_is_placed(argument, file) for argument in call.args)


def _is_placed(node: ast.expr, file: ValueVisitor) -> bool:
    value = file.assigned(node.id) if isinstance(node, ast.Name) else node
    if not isinstance(value, ast.Call) or file.resolve(value.func) != "jax.device_put":
        return False
    return len(value.args) > 1 or any(keyword.arg == "device" for keyword in value.keywords)
