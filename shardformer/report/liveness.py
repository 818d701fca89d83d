"""An estimate of the temporary memory of a traced function: which of its arrays are alive at once, at the worst moment.

XLA fuses elementwise operations, so their results take no memory; what they are computed from lives on until they are
used for the last time. Results of matrix products, reductions, loops and collectives are arrays in memory.
"""

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


class _Operation(NamedTuple):
    name: str
    inputs: list[int]  # numbers of values
    outputs: list[int]
    inner: int  # bytes that a loop's body needs while it runs


class _Program:
    """A traced function as a list of operations on numbered values, calls inlined."""

    def __init__(self, fuses_operands: bool):
        self.fuses_operands = fuses_operands
        self.operations: list[_Operation] = []
        self.sizes: list[int] = []

    def new_value(self, aval) -> int:
        self.sizes.append(_size(aval))
        return len(self.sizes) - 1

    def add(self, jaxpr, inputs: list[int]) -> list[int]:
        """The operations of a jaxpr; returns the numbers of what it returns."""
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {variable: self.new_value(variable.aval) for variable in jaxpr.constvars}
        known = lambda variables: [numbers[v] for v in variables if not hasattr(v, "val")]
        for equation in jaxpr.eqns:
            called = _called(equation)
            if called is not None and equation.primitive.name not in LOOPS:
                given = [numbers[v] if not hasattr(v, "val") else self.new_value(v.aval) for v in equation.invars]
                results = self.add(called, given)
            else:
                results = [self.new_value(variable.aval) for variable in equation.outvars]
                inner = max((peak_bytes(body, self.fuses_operands) for body in _bodies(equation)), default=0)
                self.operations.append(_Operation(equation.primitive.name, known(equation.invars), results, inner))
            numbers |= dict(zip(equation.outvars, results, strict=True))
        return [numbers[v] if not hasattr(v, "val") else self.new_value(v.aval) for v in jaxpr.outvars]


def peak_bytes(jaxpr, fuses_operands: bool = True) -> int:
    """Bytes beside the inputs, at the worst moment; the outputs count.

    fuses_operands: whether a matrix product may compute its operands on the way, as a TPU's can and a CPU's cannot;
    on a CPU, random bits are arrays in memory as well.
    """
    program = _Program(fuses_operands)
    inputs = [program.new_value(variable.aval) for variable in jaxpr.invars]
    results = program.add(jaxpr, inputs)
    unfused = set() if fuses_operands else {"random_bits", "threefry2x32"}
    in_memory = {
        value
        for operation in program.operations
        for value in (*(operation.outputs if operation.name in IN_MEMORY | unfused else ()),
                      *(operation.inputs if operation.name == "dot_general" and not fuses_operands else ()))
    } - set(inputs)  # fmt: skip
    made = dict.fromkeys(inputs, ())  # by value, the arrays in memory that it is computed from
    last_use: dict[int, int] = {}
    end = len(program.operations)
    for time, operation in enumerate(program.operations):
        sources = {array for value in operation.inputs for array in made.get(value, ())}
        last_use |= dict.fromkeys(sources, time)
        for value in operation.outputs:
            made[value] = (value,) if value in in_memory else tuple(sources)
            if value in in_memory:
                last_use[value] = time
    for value in results:
        last_use |= dict.fromkeys(made.get(value, ()), end)
    ends: dict[int, list[int]] = {}
    for array, time in last_use.items():
        ends.setdefault(time, []).append(array)
    alive = peak = 0
    for time, operation in enumerate(program.operations):
        alive += sum(program.sizes[value] for value in operation.outputs if value in in_memory)
        peak = max(peak, alive + operation.inner)
        alive -= sum(program.sizes[array] for array in ends.get(time, ()))
    return peak


def find_shard_maps(jaxpr) -> Iterator:
    """The bodies of all shard_maps, which see one device's part of every array."""
    for equation in jaxpr.eqns:
        called = _called(equation)
        if equation.primitive.name == "shard_map":
            yield called
        elif called is not None:
            yield from find_shard_maps(called)


def _called(equation):
    """The function that an operation only calls, if that is all it does."""
    for name in INLINED:
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _bodies(equation) -> list:
    if equation.primitive.name == "scan":
        return [equation.params["jaxpr"].jaxpr]
    if equation.primitive.name == "while":
        return [equation.params["body_jaxpr"].jaxpr]
    return [branch.jaxpr for branch in equation.params.get("branches", ())]


def _size(aval) -> int:
    if not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
