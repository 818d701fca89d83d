"""Reads jaxprs, JAX's traced programs, whose operations and parameters differ between JAX's releases.

Every reader of jaxprs, of the package and of its tests, asks this file. Differences that it hides:

- Until 0.11 a scan names the numbers of its inputs (`num_consts`, `num_carry`); 0.12 has trees instead.
- A called function is under another parameter of each operation, and is closed (has constants) or not.
- The axes of a collective are `axes` or `axis_name`, and the latter may be one name.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval

INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # the parameters of operations that only call a function
EXPANDED_LATER = "call_hi_primitive"  # JAX 0.12 expands it when it compiles: jnp.searchsorted, with its flags a remat
# A psum has another name in each release, and by whether its result varies over the axes.
COLLECTIVES = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce", "pmax": "all-reduce",
    "pmin": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip


def find_shard_maps(jaxpr) -> Iterator:
    """Yields the bodies of all shard_maps, which see one device's part of every array."""
    for equation in jaxpr.eqns:
        function = called(equation)
        if equation.primitive.name == "shard_map":
            yield function
        elif function is not None:
            yield from find_shard_maps(function)


def drop_dead(jaxpr):
    """Returns the jaxpr without the operations that its results do not need, with all of its inputs.

    XLA drops them too. A traced scan also stacks what only untaken gradients need, such as those of frozen weights.
    """
    return partial_eval.dce_jaxpr(_expand_all(jaxpr), [True] * len(jaxpr.outvars), instantiate=True)[0]


def _expand_all(jaxpr):
    """Replaces operations that JAX expands later by calls: dce_jaxpr keeps a dead one that has a collective."""
    if not any(equation.primitive.name == EXPANDED_LATER for inner in walk(jaxpr) for equation in inner.eqns):
        return jaxpr  # the same object, as dce_jaxpr remembers its results
    return jaxpr.replace(eqns=[_expand_equation(equation) for equation in jaxpr.eqns])


def _expand_equation(equation):
    if equation.primitive.name == EXPANDED_LATER:
        equation = equation.replace(primitive=core.primitives.closed_call_p, params={"call_jaxpr": _expand(equation)})
    return equation.replace(params={name: _expand_inside(value) for name, value in equation.params.items()})


def _expand_inside(value):
    if isinstance(value, core.ClosedJaxpr):
        return value.replace(jaxpr=_expand_all(value.jaxpr))
    if isinstance(value, core.Jaxpr):
        return _expand_all(value)
    if isinstance(value, tuple) and any(True for _ in _find_jaxprs(value)):  # the branches of a conditional
        return tuple(_expand_inside(part) for part in value)
    return value


class Loop(NamedTuple):
    """A scan or a while loop. Its body's inputs are the constants, then the carried values, then the scanned slices."""

    body: Any
    constants: int  # inputs of the body that are the same in each iteration
    carried: int
    times: int  # iterations; 1 for a while loop, whose number is unknown
    uncarried: list  # the loop's inputs that each iteration reads and none changes


def read_loop(equation) -> Loop | None:
    """Returns the loop that an operation is; None for any other operation."""
    if equation.primitive.name not in ("scan", "while"):
        return None
    (body,), invars = bodies(equation), equation.invars
    if equation.primitive.name == "scan":
        # Shapes tell the inputs apart, as releases count them differently: scanned ones have one axis less in the body.
        carried = _count_same_rank(equation.outvars, body.outvars)
        constants = _count_same_rank(invars, body.invars) - carried
        uncarried = invars[:constants] + invars[constants + carried :]
        return Loop(body, constants, carried, equation.params["length"], uncarried)
    # The first inputs of a while loop are constants of its condition.
    carried, constants = len(body.outvars), len(body.invars) - len(body.outvars)
    return Loop(body, constants, carried, 1, invars[: len(invars) - carried])


def _count_same_rank(outside, inside) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def bodies(equation) -> list:
    """Returns the body of a loop, or the branches of a conditional."""
    if equation.primitive.name == "scan":
        return [equation.params["jaxpr"].jaxpr]
    if equation.primitive.name == "while":
        return [equation.params["body_jaxpr"].jaxpr]
    return [branch.jaxpr for branch in equation.params.get("branches", ())]


def called(equation):
    """Returns the function of an operation that only calls one, else None. A kernel is one operation."""
    inner = called_closed(equation)
    return getattr(inner, "jaxpr", inner)


def called_closed(equation):
    """Returns `called` with its constants, if it has any."""
    if equation.primitive.name == EXPANDED_LATER:
        return _expand(equation)
    for name in INLINED if equation.primitive.name != "pallas_call" else ():
        inner = equation.params.get(name)
        if inner is not None:
            return inner
    return None


def _expand(equation):
    """Traces the function of an operation that JAX 0.12 expands when it compiles, such as jnp.searchsorted."""
    operation = equation.params["_prim"]
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    return jax.make_jaxpr(operation.expand)(*jax.tree.unflatten(operation.in_tree, shapes))


def find_axes(collective) -> tuple[str, ...]:
    """Returns the names of a collective's mesh axes."""
    return tuple(axis for axis in _axes(collective) if isinstance(axis, str))


def find_own_axes(collective) -> tuple[int, ...]:
    """Returns the axes of the array itself that a collective reduces too, as `logsumexp(x, axis=(0, "dp"))` does."""
    return tuple(axis for axis in _axes(collective) if not isinstance(axis, str))


def _axes(collective) -> tuple:
    axes = collective.params.get("axes", collective.params.get("axis_name", ()))
    return (axes,) if isinstance(axes, str) else tuple(axes)


def walk(jaxpr) -> Iterator:
    """Yields a jaxpr and all jaxprs inside of its operations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in _find_jaxprs(value):
                yield from walk(inner)


def _find_jaxprs(value) -> Iterator:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _find_jaxprs(part)


class ShardMap(NamedTuple):
    """A shard_map: the function of one device, and how its arguments and results are split over the mesh's axes."""

    body: Any
    mesh: dict[str, int]
    in_specs: tuple
    out_specs: tuple


def read_shard_map(equation) -> ShardMap:
    """Returns the parts of a shard_map; axes that it leaves to XLA are not among the mesh's."""
    p = equation.params
    sizes = dict(zip(p["mesh"].axis_names, p["mesh"].axis_sizes, strict=True))
    manual = {name: size for name, size in sizes.items() if name in p["newly_manual_axes"]}
    body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])
    return ShardMap(body, manual, tuple(p["in_specs"]), tuple(p["out_specs"]))
