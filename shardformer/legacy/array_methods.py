"""Methods that arrays have lost, where a call shows that its object is an array: strings have a split too."""

import ast

from shardformer.legacy.call_arguments import Resolver

# By method, the function of today, which accepts the array first.
LOST_METHODS = {
    "broadcast": "jax.lax.broadcast",
    "broadcast_in_dim": "jax.lax.broadcast_in_dim",
    "split": "jax.numpy.split",
}
_SPLIT_KEYWORDS = {"axis", "indices_or_sections"}
_HOMES = ("jax.numpy.", "jax.random.", "jax.nn.", "jax.lax.", "numpy.")
_ARRAY_METHODS = {
    "astype", "cumsum", "dot", "flatten", "max", "mean", "min", "ravel", "reshape", "squeeze", "std", "sum", "swapaxes",
    "transpose", "var",
}  # fmt: skip


def lost_method(call: ast.Call, file: Resolver) -> str | None:
    """Returns today's function for a call of a lost method of an array; None for any other call."""
    member = call.func
    if not isinstance(member, ast.Attribute) or member.attr not in LOST_METHODS or file.resolve(member) is not None:
        return None
    if member.attr == "split" and not {keyword.arg for keyword in call.keywords} <= _SPLIT_KEYWORDS:
        return None  # PyTorch's tensors have the same methods, and split(dim=)
    if is_array(member.value, file) or (member.attr == "split" and _splits_an_array(call, member.value)):
        return LOST_METHODS[member.attr]
    return None


def is_array(node: ast.AST | None, file: Resolver) -> bool:
    """Returns True if an expression is the result of a function or an operator of arrays."""
    if isinstance(node, ast.Name):
        value = file.assigned(node.id)
        return not isinstance(value, ast.Name) and is_array(value, file)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult) or is_array(node.left, file) or is_array(node.right, file)
    if isinstance(node, ast.Subscript):
        return is_array(node.value, file)
    if isinstance(node, ast.Attribute):
        return node.attr == "T"
    if not isinstance(node, ast.Call):
        return False
    if (file.resolve(node.func) or "").startswith(_HOMES):
        return True
    return isinstance(node.func, ast.Attribute) and node.func.attr in _ARRAY_METHODS


def _splits_an_array(call: ast.Call, owner: ast.expr) -> bool:
    """Returns True if the arguments are those of an array's split; a string accepts a string."""
    if call.keywords:
        return True
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    if "rng" in name.lower() or "key" in name.lower():  # streams of random keys are split too
        return False
    return len(call.args) == 2 and all(_is_number_or_list(argument) for argument in call.args)


def _is_number_or_list(node: ast.expr) -> bool:
    value = node.operand if isinstance(node, ast.UnaryOp) else node
    is_number = isinstance(value, ast.Constant) and isinstance(value.value, int)
    return is_number or isinstance(node, ast.List | ast.Tuple)
