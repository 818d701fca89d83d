"""Reads from a call's text the types, axes and dtypes of its arguments; None stands for what the text leaves open."""

import ast
from typing import Protocol

_MAKERS = {"array", "asarray", "stack"}
_FLAT = {"ravel", "flatten", "arange", "linspace"}
_DTYPE_POSITIONS = {"array": 1, "asarray": 1, "arange": 3, "eye": 3, "full": 2, "ones": 1, "zeros": 1}
_NUMPY_METHODS = {"sum", "prod", "cumsum", "mean", "std", "var"}  # numpy computes these in 64 bits


class Resolver(Protocol):
    """The source file: the meaning of its names."""

    def resolve(self, node: ast.expr) -> str | None: ...

    def assigned(self, name: str) -> ast.AST | None: ...


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """Returns an argument by its position or keyword; None if it is not given."""
    if position < len(call.args):
        return call.args[position]
    return next((each.value for each in call.keywords if each.arg == keyword), None)


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def dtype_name(node: ast.expr | None) -> str:
    """Returns the last part of a dtype: 'int8' for "int8", jnp.int8 and np.dtype("int8")."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return dtype_name(node.args[0])
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dtype_of(node: ast.AST | None, file: Resolver) -> str:
    """Returns the dtype that an expression of an array names; "" if it names none."""
    if isinstance(node, ast.Name):
        return dtype_of(file.assigned(node.id), file)
    if isinstance(node, ast.Compare):
        return "bool"
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "astype":
        return dtype_name(argument(node, 0, "dtype"))
    position = _DTYPE_POSITIONS.get((file.resolve(node.func) or "").removeprefix("jax.numpy.").removeprefix("numpy."))
    return dtype_name(argument(node, position, "dtype")) if position is not None else ""


def kind(node: ast.AST | None, file: Resolver) -> str | None:
    """Returns "integer", "complex", "float16" or "other" of an expression of numbers."""
    if isinstance(node, ast.Name):
        return kind(file.assigned(node.id), file)
    if isinstance(node, ast.Constant):
        return {int: "integer", complex: "complex", float: "other"}.get(type(node.value))
    if isinstance(node, ast.List | ast.Tuple):
        return _joined([kind(item, file) for item in node.elts])
    if isinstance(node, ast.UnaryOp):
        return kind(node.operand, file)
    if isinstance(node, ast.BinOp):
        joined = _joined([kind(node.left, file), kind(node.right, file)])
        return "other" if isinstance(node.op, ast.Div) and joined == "integer" else joined
    return _kind_of_call(node, file) if isinstance(node, ast.Call) else None


def _kind_of_call(call: ast.Call, file: Resolver) -> str | None:
    function = file.resolve(call.func) or ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "astype" and not function:
        return _kind_of_dtype(argument(call, 0, "dtype"))
    if not function.startswith(("jax.numpy.", "numpy.")):
        return None
    name = function.rpartition(".")[2]
    dtype = argument(call, _DTYPE_POSITIONS[name], "dtype") if name in _DTYPE_POSITIONS else None
    if dtype is not None:
        return _kind_of_dtype(dtype)
    return _joined([kind(item, file) for item in call.args]) if name in {*_MAKERS, "arange"} else None


def _kind_of_dtype(dtype: ast.expr | None) -> str | None:
    name = dtype_name(dtype)
    if name == "float16" or name.startswith("complex"):
        return "float16" if name == "float16" else "complex"
    return "integer" if name.startswith(("int", "uint")) else "other" if name else None


def _joined(types: list[str | None]) -> str | None:
    """The numeric type of two or more types; an unknown one hides all but complex."""
    if "complex" in types:
        return "complex"
    return types[0] if types and len(set(types)) == 1 else None


def depth(node: ast.AST | None, file: Resolver) -> int | None:
    """Returns the number of axes of a literal array."""
    if isinstance(node, ast.Name):
        return depth(file.assigned(node.id), file)
    if isinstance(node, ast.Constant | ast.UnaryOp):
        return 0
    if isinstance(node, ast.List | ast.Tuple):
        inner = depth(node.elts[0], file) if node.elts else 0
        return None if inner is None else inner + 1
    if not isinstance(node, ast.Call):
        return None
    name = (file.resolve(node.func) or "").removeprefix("jax.numpy.").removeprefix("numpy.")
    shape = argument(node, 0, "shape")
    if name in {"ones", "zeros", "full"}:
        return len(shape.elts) if isinstance(shape, ast.Tuple | ast.List) else None
    return 2 if name == "eye" else depth(node.args[0], file) if name in _MAKERS and node.args else None


def is_flat(node: ast.expr | None, file: Resolver) -> bool:
    """Returns True if an array has one axis for certain."""
    if not isinstance(node, ast.Call):
        return depth(node, file) == 1
    name = node.func.attr if isinstance(node.func, ast.Attribute) else (file.resolve(node.func) or "")
    name = name.rpartition(".")[2]
    reshaped = name == "reshape" and node.args and ast.unparse(node.args[-1]) in {"-1", "(-1,)"}
    return bool(name in _FLAT or reshaped) or depth(node, file) == 1


def is_array_method_used(callback: ast.AST | None, file: Resolver) -> bool:
    """Returns True if a function asks its argument for numpy's type, or for a method that numpy does in 64 bits."""
    if isinstance(callback, ast.Name):
        callback = file.assigned(callback.id)
    if not isinstance(callback, ast.FunctionDef | ast.Lambda):
        return False
    names = {argument.arg for argument in callback.args.args}
    return any(_depends_on_numpy(node, names, file) for node in ast.walk(callback) if isinstance(node, ast.Call))


def _depends_on_numpy(call: ast.Call, names: set[str], file: Resolver) -> bool:
    function = call.func
    if isinstance(function, ast.Name) and function.id == "isinstance" and len(call.args) == 2:
        asked = isinstance(call.args[0], ast.Name) and call.args[0].id in names
        return asked and file.resolve(call.args[1]) == "numpy.ndarray"
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return False
    return function.value.id in names and function.attr in _NUMPY_METHODS
