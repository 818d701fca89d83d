"""Estimates the memory that a traced function takes, reads and writes, from its operations.

XLA fuses elementwise operations, so their results take no memory; the arrays that they are computed from live until
their last use. Results of matrix products, reductions, loops and collectives are arrays in memory.

For a CPU, XLA fuses less: a product reads its operands from memory, and a costly result (of a division, an exponential)
is stored if several operations use it. A TPU stores the heads of its attention kernel in rows of 128 numbers.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # the parameters of operations that only call a function
LOOPS = ("scan", "while")
IN_MEMORY = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "top_k", "gather", "scatter", "scatter-add",
    "scatter_add", "cumsum", "cumlogsumexp", "cummax", "concatenate", "custom_call", "pallas_call", "all_gather",
    "all_gather_invariant", "reduce_scatter", "psum", "psum_invariant", "psum2", "pmax", "all_to_all", "ppermute",
    "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin",
}  # fmt: skip
CONSTANT = "constant"
LANES = 128  # numbers of a row of a TPU's memory
KEPT = {  # on a CPU, if more than one operation uses the result
    "sub", "div", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "pow", "rsqrt", "sqrt", "sin",
    "cos",
}  # fmt: skip


class _Operation(NamedTuple):
    """One operation on numbered values."""

    name: str
    inputs: list[int]  # numbers of values
    outputs: list[int]
    bodies: list  # of a loop or a conditional
    trips: int


class _Program:
    """A traced function as a list of operations on numbered values, calls inlined."""

    def __init__(self, jaxpr, cpu: bool, head_size: int = 0):
        self.cpu, self.head_size = cpu, head_size
        self.operations: list[_Operation] = []
        self.sizes: list[int] = []
        self.constants: dict[tuple, int] = {}
        self.inputs = [self._new_value(variable.aval) for variable in jaxpr.invars]
        self.results = self._add(jaxpr, self.inputs)
        self.in_memory = self._find_arrays() - set(self.inputs)

    def _new_value(self, aval) -> int:
        size = _size(aval)
        shape: tuple[int, ...] = getattr(aval, "shape", ())
        if self.head_size and len(shape) >= 4 and shape[-1] == self.head_size:  # [B, T, h, K], and their stack
            size = size // self.head_size * math.ceil(self.head_size / LANES) * LANES
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add(self, jaxpr, inputs: list[int]) -> list[int]:
        """Adds the operations of a jaxpr; returns the numbers of its results."""
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {variable: self._new_value(variable.aval) for variable in jaxpr.constvars}
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
                known = [numbers[v] for v in equation.invars if not hasattr(v, "val")]
                self.operations.append(_Operation(name, known, results, bodies(equation), trips))
            numbers |= dict(zip(equation.outvars, results, strict=True))
        return [numbers[v] if not hasattr(v, "val") else self._new_value(v.aval) for v in jaxpr.outvars]

    def _find_arrays(self) -> set[int]:
        """Returns the values that are arrays in memory."""
        found = {value for operation in self.operations if operation.name in IN_MEMORY for value in operation.outputs}
        if not self.cpu:
            return found - self._find_products_added_in_place()
        users = self._count_users()
        for operation in self.operations:
            if operation.name == "dot_general":
                found.update(operation.inputs)
            elif operation.name == CONSTANT:
                found.update(operation.outputs)
            elif operation.name in KEPT:
                found.update(value for value in operation.outputs if users[value] > 1)
        return found

    def _find_products_added_in_place(self) -> set[int]:
        """Returns the products that a loop only adds to a sum that it carries: a chip adds them where they are made."""
        products = {o.outputs[0] for o in self.operations if o.name == "dot_general"}
        users, found = self._count_users(), set()
        for operation in self.operations:
            if operation.name == "add" and len(operation.inputs) == 2 and operation.outputs[0] in self.results:
                for product, carried in itertools.permutations(operation.inputs):
                    if product in products and users[product] == 1 and carried in self.inputs:
                        found.add(product)
        return found

    def _count_users(self) -> collections.Counter:
        """Counts the operations that read each value, and the result as one."""
        users = collections.Counter(value for operation in self.operations for value in set(operation.inputs))
        users.update(self.results)
        return users

    def sources(self, roots: Iterable[int] = ()) -> list[set[int]]:
        """Returns for each operation the arrays that its inputs are computed from.

        The last set is of the results; `roots` are inputs that count as arrays.
        """
        made: dict[int, tuple[int, ...]] = dict.fromkeys(self.inputs, ())
        made |= {value: (value,) for value in roots}
        found = []
        for operation in self.operations:
            read = {array for value in operation.inputs for array in made.get(value, ())}
            found.append(read)
            for value in operation.outputs:
                made[value] = (value,) if value in self.in_memory else tuple(read)
        found.append({array for value in self.results for array in made.get(value, ())})
        return found


def peak_bytes(jaxpr, cpu: bool = False, head_size: int = 0) -> int:
    """Returns the bytes at the peak, with the outputs, without the inputs.

    cpu: as XLA compiles for a CPU. head_size: that of arrays which a TPU's kernel pads to its lanes, 0 if none.
    """
    program = _Program(jaxpr, cpu, head_size)
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
        inner = max((peak_bytes(body, cpu, head_size) for body in operation.bodies), default=0)
        peak = max(peak, alive + inner)
        alive -= sum(program.sizes[array] for array in ends.get(time, ()))
    return peak


def traffic_bytes(jaxpr) -> int:
    """Returns the bytes between a chip and its memory: each operation that writes an array reads its sources.

    The body of a scan counts once for each iteration, the body of a `while` once.
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
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def count_constants_and_carried(scan) -> tuple[int, int]:
    """Returns the number of a scan's constant inputs, and the number of values that it carries.

    Versions of JAX name these numbers differently, so shapes decide: scanned values have an axis more outside the body.
    """
    (body,) = bodies(scan)
    carried = _count_same_rank(scan.outvars, body.outvars)
    return _count_same_rank(scan.invars, body.invars) - carried, carried


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
    """Returns the function of an operation that only calls one, else None."""
    for name in INLINED:
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _is_constant(equation) -> bool:
    """Returns whether an operation broadcasts a literal number."""
    return equation.primitive.name == "broadcast_in_dim" and hasattr(equation.invars[0], "val")


def _size(aval) -> int:
    if not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
