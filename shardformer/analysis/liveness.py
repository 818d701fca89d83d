"""Estimates, from a traced function's operations alone, of the memory that it takes, reads and writes.

XLA fuses elementwise operations, so their results take no memory; the arrays that they are computed from live until
their last use. Results of matrix products, reductions, loops and collectives are arrays in memory.

For a CPU, XLA fuses less: a product reads its operands from memory, and what is costly to compute (a division, an
exponential) is stored where several operations use it.
"""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # the parameters of operations that only call a function
LOOPS = ("scan", "while")
IN_MEMORY = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "top_k", "gather", "scatter", "scatter-add",
    "scatter_add", "cumsum", "cumlogsumexp", "cummax", "concatenate", "custom_call", "pallas_call", "all_gather",
    "all_gather_invariant", "reduce_scatter", "psum", "psum_invariant", "psum2", "pmax", "all_to_all", "ppermute",
    "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin",
}  # fmt: skip
CONSTANT = "constant"
KEPT = {  # on a CPU, where more than one operation uses it
    "sub", "div", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "pow", "rsqrt", "sqrt", "sin",
    "cos",
}  # fmt: skip


class _Operation(NamedTuple):
    name: str
    inputs: list[int]  # numbers of values
    outputs: list[int]
    bodies: list  # of a loop or a conditional
    trips: int


class _Program:
    """A traced function as a list of operations on numbered values, calls inlined."""

    def __init__(self, jaxpr, cpu: bool):
        self.cpu = cpu
        self.operations: list[_Operation] = []
        self.sizes: list[int] = []
        self.constants: dict[tuple, int] = {}
        self.inputs = [self._new_value(variable.aval) for variable in jaxpr.invars]
        self.results = self._add(jaxpr, self.inputs)
        self.in_memory = self._find_arrays() - set(self.inputs)

    def _new_value(self, aval) -> int:
        self.sizes.append(_size(aval))
        return len(self.sizes) - 1

    def _add(self, jaxpr, inputs: list[int]) -> list[int]:
        """The operations of a jaxpr; returns the numbers of what it returns."""
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {variable: self._new_value(variable.aval) for variable in jaxpr.constvars}
        known = lambda variables: [numbers[v] for v in variables if not hasattr(v, "val")]
        for equation in jaxpr.eqns:
            name, function = equation.primitive.name, called(equation)
            if function is not None and name not in LOOPS:
                given = [numbers[v] if not hasattr(v, "val") else self._new_value(v.aval) for v in equation.invars]
                results = self._add(function, given)
            else:
                if _is_constant(equation):
                    aval = equation.outvars[0].aval
                    again = aval.shape, aval.dtype, str(equation.invars[0].val)
                    if again in self.constants:
                        numbers[equation.outvars[0]] = self.constants[again]
                        continue
                    name, self.constants[again] = CONSTANT, len(self.sizes)
                results = [self._new_value(variable.aval) for variable in equation.outvars]
                trips = equation.params.get("length", 1) if name == "scan" else 1
                self.operations.append(_Operation(name, known(equation.invars), results, bodies(equation), trips))
            numbers |= dict(zip(equation.outvars, results, strict=True))
        return [numbers[v] if not hasattr(v, "val") else self._new_value(v.aval) for v in jaxpr.outvars]

    def _find_arrays(self) -> set[int]:
        """The values that are arrays in memory."""
        found = {value for operation in self.operations if operation.name in IN_MEMORY for value in operation.outputs}
        if not self.cpu:
            return found
        users = collections.Counter(value for operation in self.operations for value in set(operation.inputs))
        users.update(self.results)
        for operation in self.operations:
            if operation.name == "dot_general":
                found.update(operation.inputs)
            elif operation.name == CONSTANT:
                found.update(operation.outputs)
            elif operation.name in KEPT:
                found.update(value for value in operation.outputs if users[value] > 1)
        return found

    def sources(self, roots: Iterator[int] | tuple = ()) -> list[set[int]]:
        """For each operation, the arrays that its inputs are computed from; `roots` are inputs that count as arrays."""
        made = dict.fromkeys(self.inputs, ()) | {value: (value,) for value in roots}
        found = []
        for operation in self.operations:
            read = {array for value in operation.inputs for array in made.get(value, ())}
            found.append(read)
            for value in operation.outputs:
                made[value] = (value,) if value in self.in_memory else tuple(read)
        found.append({array for value in self.results for array in made.get(value, ())})  # what is returned
        return found


def peak_bytes(jaxpr, cpu: bool = False) -> int:
    """Bytes besides the inputs at the peak, with the outputs. cpu: as XLA compiles for a CPU."""
    program = _Program(jaxpr, cpu)
    written = [[value for value in o.outputs if value in program.in_memory] for o in program.operations]
    last_use: dict[int, int] = {}
    for time, read in enumerate(program.sources()):
        last_use |= dict.fromkeys(read, time)
        last_use |= dict.fromkeys(written[time] if time < len(written) else (), time)
    ends: dict[int, list[int]] = {}
    for array, time in last_use.items():
        ends.setdefault(time, []).append(array)
    alive = peak = 0
    for time, operation in enumerate(program.operations):
        alive += sum(program.sizes[value] for value in written[time])
        inner = max((peak_bytes(body, cpu) for body in operation.bodies), default=0)
        peak = max(peak, alive + inner)
        alive -= sum(program.sizes[array] for array in ends.get(time, ()))
    return peak


def traffic_bytes(jaxpr) -> int:
    """Bytes between a chip and its memory: each operation that writes an array reads those that it is computed from.

    The body of a scan counts once for each iteration, that of a `while` once.
    """
    program = _Program(jaxpr, cpu=False)
    total = 0
    for operation, read in zip(program.operations, program.sources(program.inputs), strict=False):
        written = [value for value in operation.outputs if value in program.in_memory]
        if operation.bodies:
            total += operation.trips * max(traffic_bytes(body) for body in operation.bodies)
        elif written:
            total += sum(program.sizes[value] for value in (*read, *written))
    return total


def find_shard_maps(jaxpr) -> Iterator:
    """The bodies of all shard_maps, which see one device's part of every array."""
    for equation in jaxpr.eqns:
        function = called(equation)
        if equation.primitive.name == "shard_map":
            yield function
        elif function is not None:
            yield from find_shard_maps(function)


def drop_dead(jaxpr, wanted: list[bool] | None = None) -> tuple:
    """(the jaxpr with only the wanted of its results, or all, and what they need; which of its inputs that reads).

    XLA does so too. A traced scan also stacks what only gradients need that nobody takes, such as those of frozen
    weights. All inputs stay. To be measured, not to be run: other parameters of a call still fit the call as it was.
    """
    results = jaxpr.outvars if wanted is None else _select(jaxpr.outvars, wanted)
    live, kept = set(_variables(results)), []
    for equation in reversed(jaxpr.eqns):
        needed = [variable in live for variable in equation.outvars]
        if any(needed):
            smaller = _drop_inside(equation, needed)
            kept.append(smaller)
            live.update(_variables(smaller.invars))
    return jaxpr.replace(eqns=kept[::-1], outvars=results), [variable in live for variable in jaxpr.invars]


def _drop_inside(equation, wanted: list[bool]):
    """An operation with the wanted of its results, as far as it has a body that can do without the others."""
    if equation.primitive.name == "scan":
        return _drop_inside_scan(equation, wanted)
    if equation.primitive.name == "cond":
        return _drop_inside_cond(equation, wanted)
    name = next((name for name in INLINED if equation.params.get(name) is not None), None)
    if name is None:  # a `while` keeps what it carries
        return equation
    smaller, read = drop_dead(called(equation), wanted)
    body = _with_inputs(equation.params[name], smaller, read)
    return _replace(equation, {name: body}, read, wanted)


def _drop_inside_scan(equation, wanted: list[bool]):
    """What a scan carries is wanted if it is returned, or if the next iteration computes something wanted from it."""
    first, count = count_constants_and_carried(equation)
    last = first + count
    carried, stacked = wanted[:count], wanted[count:]
    while True:
        smaller, read = drop_dead(*bodies(equation), carried + stacked)
        before, carried = carried, [a or b for a, b in zip(carried, read[first:last], strict=True)]
        if carried == before:
            break
    read = read[:first] + carried + read[last:]
    changed = {"jaxpr": _with_inputs(equation.params["jaxpr"], smaller, read)}
    if "num_consts" in equation.params:  # before jax 0.12
        changed |= {"num_consts": sum(read[:first]), "num_carry": sum(carried)}
    else:
        masks = {"ft_in": read, "ft_out": carried + stacked}
        changed |= {name: equation.params[name].filter_with_mask(mask) for name, mask in masks.items()}
    return _replace(equation, changed, read, carried + stacked)


def count_constants_and_carried(scan) -> tuple[int, int]:
    """How many of a scan's inputs are the same in every iteration, and how many it carries from one to the next.

    By their shapes, as versions of JAX name these numbers differently: all else has an axis more outside of the body.
    """
    (body,) = bodies(scan)
    count_whole = lambda outside, inside: sum(
        len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True)
    )
    carried = count_whole(scan.outvars, body.outvars)
    return count_whole(scan.invars, body.invars) - carried, carried


def _drop_inside_cond(equation, wanted: list[bool]):
    branches = equation.params["branches"]
    smaller, reads = zip(*(drop_dead(branch.jaxpr, wanted) for branch in branches), strict=True)
    read = [any(each) for each in zip(*reads, strict=True)]
    changed = tuple(_with_inputs(old, new, read) for old, new in zip(branches, smaller, strict=True))
    return _replace(equation, {"branches": changed}, [True, *read], wanted)  # the first input chooses


def _with_inputs(body, smaller, read: list[bool]):
    """The jaxpr in the form that it had as a parameter, with these of its inputs."""
    smaller = smaller.replace(invars=_select(smaller.invars, read))
    return body.replace(jaxpr=smaller) if hasattr(body, "consts") else smaller


def _replace(equation, params: dict, read: list[bool], wanted: list[bool]):
    return equation.replace(
        params=equation.params | params,
        invars=_select(equation.invars, read),
        outvars=_select(equation.outvars, wanted),
    )


def _variables(atoms) -> list:
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _select(items, chosen: list[bool]) -> list:
    return list(itertools.compress(items, chosen))


def bodies(equation) -> list:
    """The body of a loop, or the branches of a conditional."""
    if equation.primitive.name == "scan":
        return [equation.params["jaxpr"].jaxpr]
    if equation.primitive.name == "while":
        return [equation.params["body_jaxpr"].jaxpr]
    return [branch.jaxpr for branch in equation.params.get("branches", ())]


def called(equation):
    """The function of an operation that only calls one, else None."""
    for name in INLINED:
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _is_constant(equation) -> bool:
    """An array of one number."""
    return equation.primitive.name == "broadcast_in_dim" and hasattr(equation.invars[0], "val")


def _size(aval) -> int:
    if not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
