"""Calls of removed functions that become calls of another shape: `index_update(x, i, y)` to `x.at[i].set(y)`."""

import ast
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shardformer.legacy.array_methods import lost_method
from shardformer.legacy.frozen_dicts import unfrozen_result
from shardformer.legacy.migration.name_targets import INDEX_METHODS

HOST_CALLBACK = "jax.experimental.host_callback"
PJIT = "jax.experimental.pjit.pjit"
RESOURCES = {"in_axis_resources": "in_shardings", "out_axis_resources": "out_shardings"}


class Rewritten(NamedTuple):
    """The text of a call, and the imports that it needs."""

    text: str
    imports: tuple[str, ...]


class _Spelling(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def imports(self) -> tuple[str, ...]: ...


class Speller(Protocol):
    """The source file, as NameEdits knows it."""

    @property
    def helpers(self) -> str: ...

    def text(self, node: ast.expr) -> str: ...

    def spell(self, dotted: str) -> _Spelling: ...

    def resolve(self, node: ast.expr) -> str | None: ...

    def assigned(self, name: str) -> ast.AST | None: ...

    def is_buffer(self, node: ast.expr) -> bool: ...


def rewrite_call(file: Speller, function: str, call: ast.Call) -> Rewritten | None:
    """Returns the text of a call of a removed function; None if it has no mechanical answer."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        return None
    if function == "functools.partial" and call.args and file.resolve(call.args[0]) == PJIT:
        return _pjit(file, call, number=1, start=f"{file.text(call.func)}(")
    if isinstance(call.func, ast.Attribute) and file.resolve(call.func) is None:
        return _member_call(file, call.func, call)
    if function in INDEX_METHODS:
        return _index_update(file, INDEX_METHODS[function], call)
    rewrite = _REWRITES.get(function)
    return rewrite(file, call) if rewrite is not None else None


def rewrite_statement(file: Speller, function: str, call: ast.Call) -> Rewritten | None:
    """Returns the text of a call whose result is not used."""
    arguments = [file.text(argument) for argument in call.args]
    if call.keywords or not arguments:
        return None
    if function == f"{HOST_CALLBACK}.id_tap" and len(arguments) == 2:
        return _called(file, "jax.debug.callback", [*arguments, "()"])  # the callback accepts (value, transforms)
    if function == f"{HOST_CALLBACK}.id_print" and len(arguments) == 1:
        return _called(file, "jax.debug.print", ['"{}"', *arguments])
    if function == f"{HOST_CALLBACK}.barrier_wait":
        return _called(file, "jax.effects_barrier", [])
    return None


def _called(file: Speller, dotted: str, arguments: list[str]) -> Rewritten:
    spelled = file.spell(dotted)
    return Rewritten(f"{spelled.text}({', '.join(arguments)})", spelled.imports)


def _all_arguments(file: Speller, call: ast.Call) -> list[str]:
    return [*map(file.text, call.args), *(f"{k.arg}={file.text(k.value)}" for k in call.keywords)]


def _member_call(file: Speller, member: ast.Attribute, call: ast.Call) -> Rewritten | None:
    array = file.text(member.value)
    if unfrozen_result(call, file) is not None:
        return _called(file, "flax.core.unfreeze", [array])
    if (today := lost_method(call, file)) is not None:
        return _called(file, today, [array, *_all_arguments(file, call)])
    if call.args or call.keywords:
        return None
    if member.attr == "device" and file.is_buffer(member.value):
        return Rewritten(f"{array}.device", ())  # on one device, where x.device() and x.device are the same
    if member.attr == "to_py":
        return _called(file, "numpy.asarray", [array])
    return Rewritten(f"{array}.addressable_data(0)", ()) if member.attr == "local_data" else None


def _index_update(file: Speller, method: str, call: ast.Call) -> Rewritten | None:
    if len(call.args) != 3:
        return None
    x, index, y = call.args
    literal = isinstance(index, ast.Subscript) and file.resolve(index.value) == "jax.ops.index"
    where = file.text(index.slice) if literal and isinstance(index, ast.Subscript) else file.text(index)
    keywords = [f"{k.arg}={file.text(k.value)}" for k in call.keywords]
    asarray = file.spell("jax.numpy.asarray")
    text = f"{asarray.text}({file.text(x)}).at[{where}].{method}({', '.join([file.text(y), *keywords])})"
    return Rewritten(text, asarray.imports)


def _to_dlpack(file: Speller, call: ast.Call) -> Rewritten | None:
    if len(call.args) != 1 or call.keywords:
        return None
    x = file.text(call.args[0])
    array = x if isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({x})"
    return Rewritten(f"{array}.__dlpack__()", ())


def _msort(home: str) -> Callable[[Speller, ast.Call], Rewritten]:
    def rewrite(file: Speller, call: ast.Call) -> Rewritten:
        return _called(file, f"{home}.sort", [*_all_arguments(file, call), "axis=0"])

    return rewrite


def _in1d(home: str) -> Callable[[Speller, ast.Call], Rewritten | None]:
    def rewrite(file: Speller, call: ast.Call) -> Rewritten | None:
        if len(call.args) < 2:
            return None
        isin = _called(file, f"{home}.isin", _all_arguments(file, call))
        return Rewritten(f"{isin.text}.ravel()", isin.imports)

    return rewrite


def _asfarray(file: Speller, call: ast.Call) -> Rewritten | None:
    if len(call.args) != 1 or call.keywords:
        return None
    return _called(file, "numpy.asarray", [file.text(call.args[0]), f"dtype={file.spell('builtins.float').text}"])


def _tie_in(file: Speller, call: ast.Call) -> Rewritten | None:
    return Rewritten(f"({file.text(call.args[1])})", ()) if len(call.args) == 2 else None


def _shuffle(file: Speller, call: ast.Call) -> Rewritten:
    return _called(file, "jax.random.permutation", [*_all_arguments(file, call), "independent=True"])


def _enable_x64(file: Speller, call: ast.Call) -> Rewritten:
    return _called(file, "jax.enable_x64", [file.text(argument) for argument in call.args] or ["True"])


def _disable_x64(file: Speller, call: ast.Call) -> Rewritten:
    return _called(file, "jax.enable_x64", ["False"])


def _seeded_key(implementation: str) -> Callable[[Speller, ast.Call], Rewritten]:
    def rewrite(file: Speller, call: ast.Call) -> Rewritten:
        return _called(file, "jax.random.PRNGKey", [*_all_arguments(file, call), f'impl="{implementation}"'])

    return rewrite


def _sph_harm(file: Speller, call: ast.Call) -> Rewritten | None:
    names = ("m", "n", "theta", "phi", "n_max")
    given = dict(zip(names, map(file.text, call.args), strict=False))
    given |= {keyword.arg or "": file.text(keyword.value) for keyword in call.keywords}
    if not set(names[:4]) <= set(given) <= set(names):
        return None
    most = [f"n_max={given['n_max']}"] if "n_max" in given else []
    return _called(file, "jax.scipy.special.sph_harm_y", [given["n"], given["m"], given["phi"], given["theta"], *most])


def _host_call(file: Speller, call: ast.Call) -> Rewritten | None:
    given = {keyword.arg: file.text(keyword.value) for keyword in call.keywords}
    if len(call.args) != 2 or set(given) - {"result_shape"}:
        return None
    function, argument = map(file.text, call.args)
    return _called(file, "jax.experimental.io_callback", [function, given.get("result_shape", "None"), argument])


def _pjit(file: Speller, call: ast.Call, number: int = 0, start: str = "") -> Rewritten | None:
    """Rewrites pjit to jit; `number`: of the argument pjit itself is in partial(pjit, ...).

    With layouts it becomes a helper, which moves arguments that jax.jit rejects, and constrains results in two steps.
    """
    positional = call.args[number:]
    if len(positional) > 3 or (number and positional):
        return None
    spec = file.spell("jax.sharding.PartitionSpec")
    given = list(zip(RESOURCES, positional[1:], strict=False))
    arguments = [file.text(positional[0])] if positional else []
    given += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
    asked = {RESOURCES.get(name, name) for name, value in given if ast.unparse(value) != "None"}
    is_helper = not asked.isdisjoint(RESOURCES.values())
    helper = Rewritten("jit_in_layout", (f"from {file.helpers} import jit_in_layout",))
    jit = helper if is_helper else file.spell("jax.jit")
    uses_spec = False
    for name, value in given:
        if name in RESOURCES:
            text, replaced = _shardings(file, value, spec.text, top=name == "in_axis_resources")
            uses_spec |= replaced
            arguments.append(f"{RESOURCES[name]}={text}")
        elif name == "fun":  # jit accepts it by position only
            arguments.insert(0, file.text(value))
        else:
            arguments.append(f"{name}={file.text(value)}")
    imports = (*jit.imports, *(spec.imports if uses_spec else ()))
    if start:
        return Rewritten(f"{start}{', '.join([jit.text, *arguments])})", imports)
    return Rewritten(f"{jit.text}({', '.join(arguments)})", imports)


def _shardings(file: Speller, value: ast.expr, spec: str, top: bool = False) -> tuple[str, bool]:
    """Returns the text of pjit's resources for jit, and True if a None became `P()`: None meant replicated."""
    if isinstance(value, ast.Constant) and value.value is None:
        return f"{spec}()", True
    if isinstance(value, ast.Tuple | ast.List):
        parts = [_shardings(file, item, spec) for item in value.elts]
        items = ", ".join(text for text, _ in parts)
        as_tuple = top or isinstance(value, ast.Tuple)
        text = f"({items}{',' if len(parts) == 1 else ''})" if as_tuple else f"[{items}]"
        return text, any(replaced for _, replaced in parts)
    return file.text(value), False


_REWRITES: dict[str, Callable[[Speller, ast.Call], Rewritten | None]] = {
    "jax.dlpack.to_dlpack": _to_dlpack,
    **{f"{home}.msort": _msort(home) for home in ("jax.numpy", "numpy")},
    **{f"{home}.in1d": _in1d(home) for home in ("jax.numpy", "numpy")},
    "numpy.asfarray": _asfarray,
    "jax.lax.tie_in": _tie_in,
    "jax.random.shuffle": _shuffle,
    **{f"jax.experimental.{home}enable_x64": _enable_x64 for home in ("", "x64_context.")},
    **{f"jax.experimental.{home}disable_x64": _disable_x64 for home in ("", "x64_context.")},
    **{f"jax.random.{name}_key": _seeded_key(name) for name in ("rbg", "threefry2x32", "unsafe_rbg")},
    "jax.scipy.special.sph_harm": _sph_harm,
    f"{HOST_CALLBACK}.call": _host_call,
    PJIT: _pjit,
}
