"""Estimates the memory that a traced function takes, reads and writes, from its operations.

XLA fuses elementwise operations, so their results take no memory; the arrays that they are computed from live until
their last use. Results of matrix products, reductions, loops and collectives are arrays in memory.

For a CPU, XLA fuses less: a product reads its operands from memory, and a costly result (of a division, an exponential)
is stored if two or more operations use it. A chip writes a product in the type of its only cast. Its collectives,
gathers, kernels and loops read their operands from memory. A TPU stores the heads of its attention kernel in rows of
128 values. What is not estimated: the holes that XLA leaves between arrays, up to 7% of the bytes of a compiled step.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardformer.exact import jaxprs

IN_MEMORY = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "top_k", "gather", "scatter", "scatter-add",
    "scatter_add", "cumsum", "cumlogsumexp", "cummax", "concatenate", "custom_call", "pallas_call", "all_gather",
    "all_gather_invariant", "reduce_scatter", "psum", "psum_invariant", "psum2", "pmax", "all_to_all", "ppermute",
    "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "custom_vmap_call",
}  # fmt: skip
# `kernels/linear.py` chooses a product by platform, and `kernels/tiles.py` one with codes by the number of rows too.
PRODUCTS = ("dot_general", "cond", "custom_vmap_call")
READERS = ("gather", "reduce_scatter", "all_gather", "all_gather_invariant", "ppermute", "all_to_all")
KERNEL = "pallas_call"  # reads all of its operands from memory: nothing is fused into it
RENAMING = {  # operations whose result is their operand in memory
    "pvary", "pcast", "reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "name", "copy", "copy_p",
}  # fmt: skip
CONSTANT, SLICE = "constant", "dynamic_slice"
LANES = 128  # values in a row of a TPU's memory
STORED_RESULTS = {  # on a CPU, if more than one operation uses the result
    "sub", "div", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "pow", "rsqrt", "sqrt", "sin",
    "cos",
}  # fmt: skip


class _Operation(NamedTuple):
    """One operation on numbered values."""

    name: str
    inputs: list[int]  # indices of values
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
        self.read_by_loops: list[int] = []  # operands that loops do not carry
        self.inputs = [self._new_value(variable.aval) for variable in jaxpr.invars]
        self.results = self._add(jaxpr, self.inputs)
        self.users = self._count_users()
        self.casts = {} if cpu else self._fold_casts()
        self.in_memory = self._find_arrays() - set(self.inputs)

    def _new_value(self, aval) -> int:
        size = _size(aval)
        shape: tuple[int, ...] = getattr(aval, "shape", ())
        if self.head_size and len(shape) >= 4 and shape[-1] == self.head_size:  # [B, T, h, K], and their stack
            size = size // self.head_size * math.ceil(self.head_size / LANES) * LANES
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add(self, jaxpr, inputs: list[int]) -> list[int]:
        """Adds the operations of a jaxpr; returns the indices of its results."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {variable: self._new_value(variable.aval) for variable in jaxpr.constvars}
        for equation in jaxpr.eqns:
            name, function = equation.primitive.name, jaxprs.called(equation)
            loop = jaxprs.read_loop(equation)
            if function is not None and not loop:
                given = [values[v] if not hasattr(v, "val") else self._new_value(v.aval) for v in equation.invars]
                results = self._add(function, given)
            else:
                if _is_constant(equation):
                    aval = equation.outvars[0].aval
                    constant = aval.shape, aval.dtype, str(equation.invars[0].val)
                    if constant in self.constants:
                        values[equation.outvars[0]] = self.constants[constant]
                        continue
                    name, self.constants[constant] = CONSTANT, len(self.sizes)
                results = [self._new_value(variable.aval) for variable in equation.outvars]
                trips = loop.times if loop else 1
                known = [values[v] for v in equation.invars if not hasattr(v, "val")]
                self.operations.append(_Operation(name, known, results, jaxprs.bodies(equation), trips))
                if loop:
                    self.read_by_loops += [values[v] for v in loop.uncarried if not hasattr(v, "val")]
            values |= dict(zip(equation.outvars, results, strict=True))
        return [values[v] if not hasattr(v, "val") else self._new_value(v.aval) for v in jaxpr.outvars]

    def _find_arrays(self) -> set[int]:
        """Returns the values that are arrays in memory."""
        result = {value for operation in self.operations if operation.name in IN_MEMORY for value in operation.outputs}
        if not self.cpu:
            return result.union(self._find_read_from_memory()) - self._find_accumulating_products()
        for operation in self.operations:
            if operation.name == "dot_general":
                result.update(operation.inputs)
            elif operation.name == CONSTANT:
                result.update(operation.outputs)
            elif operation.name in STORED_RESULTS:
                result.update(value for value in operation.outputs if self.users[value] > 1)
        return result

    def _find_read_from_memory(self) -> Iterator[int]:
        """Yields the operands of loops, collectives and gathers, which a chip does not compute within them."""
        producers = {value: operation for operation in self.operations for value in operation.outputs}
        read = [operation.inputs[0] for operation in self.operations if operation.name in READERS]
        read += [value for operation in self.operations if operation.name == KERNEL for value in operation.inputs]
        for value in (*read, *self.read_by_loops):
            while value in self.casts or (value in producers and _renames(producers[value])):
                value = self.casts[value] if value in self.casts else producers[value].inputs[0]
            if value in producers and producers[value].inputs:  # else an input or a constant
                yield value

    def _find_accumulating_products(self) -> set[int]:
        """Returns the products that a loop only adds to a carried sum: a chip adds them where they are computed."""
        products = {o.outputs[0] for o in self.operations if o.name == "dot_general"}
        result = set()
        for operation in self.operations:
            if operation.name == "add" and len(operation.inputs) == 2 and operation.outputs[0] in self.results:
                for product, carried in itertools.permutations(operation.inputs):
                    if product in products and self.users[product] == 1 and carried in self.inputs:
                        result.add(product)
        return result

    def _fold_casts(self) -> dict[int, int]:
        """Gives each product that is only cast the size of its cast, in which a chip writes it.

        Returns {cast: product}, also of a product's transposition.
        """
        product_of: dict[int, int] = {}
        for operation in self.operations:
            if operation.name in PRODUCTS:
                product_of |= {value: value for value in operation.outputs}
            elif operation.name == "convert_element_type" or _renames(operation):
                value, result = operation.inputs[0], operation.outputs[0]
                if value in product_of and self.users[value] == 1:
                    product = product_of[result] = product_of[value]
                    self.sizes[product] = self.sizes[result]
        return {value: product for value, product in product_of.items() if value != product}

    def _count_users(self) -> collections.Counter:
        """Counts the operations that read each value, and the result as one."""
        users = collections.Counter(value for operation in self.operations for value in set(operation.inputs))
        users.update(self.results)
        return users

    def written(self, number: int) -> list[int]:
        """Returns the arrays that an operation writes."""
        return [value for value in self.operations[number].outputs if value in self.in_memory]

    def overwrites(self, operation: _Operation) -> bool:
        """Returns whether an operation is elementwise with one reader: XLA writes its result over its operand.

        Two or more readers would each recompute it from the operand.
        """
        return operation.name not in IN_MEMORY and all(self.users[value] == 1 for value in operation.outputs)

    def sources(self, roots: Iterable[int] = (), slices: bool = False) -> list[set[int]]:
        """Returns for each operation the arrays that its inputs are computed from.

        The last set is of the results; `roots` are inputs that count as arrays. slices: instead of the array, the slice
        of it that is read.
        """
        origins: dict[int, tuple[int, ...]] = dict.fromkeys(self.inputs, ())
        origins |= {value: (value,) for value in roots}
        result = []
        for operation in self.operations:
            read = {array for value in operation.inputs for array in origins.get(value, ())}
            result.append(read)
            for value in operation.outputs:
                is_array = value in self.in_memory or (slices and operation.name == SLICE)
                origins[value] = (value,) if is_array else tuple(read)
        result.append({array for value in self.results for array in origins.get(value, ())})
        return result


def peak_bytes(jaxpr, cpu: bool = False, head_size: int = 0) -> int:
    """Returns the bytes at the peak, with the outputs, without the inputs.

    cpu: as XLA compiles for a CPU. head_size: that of arrays which a TPU's kernel pads to its lanes, 0 if none.
    """
    program = _Program(jaxpr, cpu, head_size)
    sources = program.sources()
    last_use: dict[int, int] = {}
    for time in range(len(program.operations)):
        if written := program.written(time):  # else its readers compute it
            last_use |= dict.fromkeys((*sources[time], *written), time)
    last_use |= dict.fromkeys(sources[-1], len(program.operations))
    ends: dict[int, list[int]] = collections.defaultdict(list)
    for array, time in last_use.items():
        ends[time].append(array)
    alive = peak = 0
    for time, operation in enumerate(program.operations):
        results = sum(program.sizes[value] for value in program.written(time))
        inner = max((peak_bytes(body, cpu, head_size) for body in operation.bodies), default=0)
        if operation.name == "cond":  # its results are those of the branch that runs
            inner = max(inner - results, 0)
        ended = sum(program.sizes[array] for array in ends[time])
        in_place = min(results, ended) if program.overwrites(operation) else 0
        alive += results
        peak = max(peak, alive - in_place + inner)
        alive -= ended
    return peak


def traffic_bytes(jaxpr) -> int:
    """Returns the bytes between a chip and its memory: each operation that writes an array reads its sources.

    The body of a scan counts once for each iteration, the body of a `while` once.
    """
    program = _Program(jaxpr, cpu=False)
    total = 0
    for operation, read in zip(program.operations, program.sources(program.inputs, slices=True), strict=False):
        written = [value for value in operation.outputs if value in program.in_memory]
        if operation.bodies:
            total += operation.trips * max(traffic_bytes(body) for body in operation.bodies)
        elif written:
            of_slice = operation.name == SLICE
            total += sum(program.sizes[value] for value in (*(written if of_slice else read), *written))
    return total


def _renames(operation: _Operation) -> bool:
    """Returns whether an operation's result is its operand in memory."""
    return operation.name in RENAMING and bool(operation.inputs)


def _is_constant(equation) -> bool:
    """Returns whether an operation broadcasts a literal number."""
    return equation.primitive.name == "broadcast_in_dim" and hasattr(equation.invars[0], "val")


def _size(aval) -> int:
    if not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
