"""Runs a traced program for all devices of its meshes in lockstep, in NumPy, with floats in float64.

A sharded program is a jaxpr with `shard_map`. It needs no device and no compiler here, so a laptop runs the program of
a mesh of 512 devices, and the results of two meshes differ by the rounding of float64 only. Integers, booleans and
random bits are bitwise those of XLA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import numpy as np
from numpy import ndarray

from shardformer.errors import RunError, UsageError
from shardformer.exact import elementwise, jaxprs, movement, products, reductions  # noqa: F401
from shardformer.exact.lockstep import Collectives, Mesh, find_differing, join, split
from shardformer.exact.operations import RULES, Operation, is_float, own_axes, working_dtype
from shardformer.exact.prepared import Step, add_mesh_axes, prepare, widen
from shardformer.exact.source_lines import find_line
from shardformer.tables import format_bytes

# (equation, its inputs, its results, the mesh) -> other results
Change = Callable[[Any, list[ndarray], list[ndarray], Mesh], list[ndarray]]


class Sent(NamedTuple):
    """A tensor that a collective sends, and how often."""

    operation: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # of the result on one device
    dtype: str
    pairs: tuple[tuple[int, int], ...]  # (sender, receiver) of a collective-permute, as indices along the axes
    line: str
    times: int

    @property
    def bytes(self) -> int:
        """The bytes of one result on one device."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Disagreement(NamedTuple):
    """A result that a shard_map returns as the same on all devices of an axis, but that differs between them."""

    output: int  # of the shard_map
    axis: str
    difference: float


class Run(NamedTuple):
    """The outputs of a program, the tensors it sent, and the outputs in which devices differ that should agree."""

    outputs: Any
    wire: list[Sent]
    disagreements: list[Disagreement]


def run(
    function: Callable, *arguments, shapes: tuple | None = None, floats: Literal["float64", "stored"] = "float64",
    memory: float = 8e9, watch: Callable[[Any], None] | None = None, change: Change | None = None,
) -> Run:  # fmt: skip
    """Runs `function(*arguments)` for all devices of the meshes of its shard_maps, without any device.

    >>> import jax, numpy as np
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> from shardformer import exact
    >>> mesh = AbstractMesh((64, 8), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
    >>> add = jax.shard_map(lambda x: jax.lax.psum(x, "mp"), mesh=mesh, in_specs=P("dp", "mp"), out_specs=P("dp"))
    >>> done = exact.run(add, np.ones((64, 8), np.float32))
    >>> done.outputs.shape, float(done.outputs.sum()), done.wire[0].axes
    ((64, 1), 512.0, ('mp',))

    Arguments:
        function: any function that JAX can trace. Its shard_maps may be on a `Mesh` or an `AbstractMesh`.
        arguments: trees of arrays. Floats become float64. Give every array as an argument: what the function computes
            of other arrays, JAX computes while it traces, in float32.
        shapes: the arguments' shapes and stored dtypes, where the arrays have others: results of another run.
        floats: "float64", or "stored" to round each result to the dtype that the program stores.
        memory: the bytes that live arrays may take.
        watch: is called with each equation before it runs.
        change: replaces the results of an equation, to try out what would be right.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*(shapes or jax.tree.map(_describe, arguments)))
    options = {"floats": floats, "memory": memory, "watch": watch, "change": change}
    result = run_jaxpr(traced, jax.tree.leaves(arguments), **options)
    return result._replace(outputs=jax.tree.unflatten(jax.tree.structure(shape), result.outputs))


def run_jaxpr(closed, leaves: Sequence, **options) -> Run:
    """Runs a traced program; the outputs are a list."""
    interpreter = Interpreter(**options)
    arrays = [widen(leaf, variable.aval.dtype) for leaf, variable in zip(leaves, closed.jaxpr.invars, strict=True)]
    with np.errstate(all="ignore"):
        outputs = interpreter.run_closed(closed, arrays, {})
    return Run(outputs, interpreter.wire, interpreter.disagreements)


def _describe(leaf) -> jax.ShapeDtypeStruct:
    """Returns the shape and the dtype for which an argument is traced: that of the program, such as float32."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype if is_key else jax.dtypes.canonicalize_dtype(dtype))


class Interpreter:
    """The walk through a program. `mesh` arguments are the axes of the shard_maps around an operation."""

    def __init__(
        self, floats: str = "float64", memory: float = 8e9, watch: Callable[[Any], None] | None = None,
        change: Change | None = None,
    ):  # fmt: skip
        self.disagreements: list[Disagreement] = []
        self._sent: dict[Sent, int] = {}  # what was sent once, and how often
        self._rounds, self._memory, self._live = floats == "stored", memory, 0
        self._watch, self._change = watch, change
        self._running: list = []  # the equations around the running one, and this one

    @property
    def wire(self) -> list[Sent]:
        """Every tensor that was sent."""
        return [sent._replace(times=times) for sent, times in self._sent.items()]

    def run_closed(self, closed, arrays: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs a jaxpr with its constants."""
        jaxpr, constants = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, [])
        values = [
            add_mesh_axes(widen(value, variable.aval.dtype), mesh)
            for value, variable in zip(constants, jaxpr.constvars, strict=True)
        ]
        return self.run_jaxpr(jaxpr, values, arrays, mesh)

    def run_jaxpr(self, jaxpr, constants: list[ndarray], arrays: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs equation after equation, and frees an array after its last use."""
        program = prepare(jaxpr, choose_runner)
        values = program.start(mesh)
        values.update(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arrays], strict=True))
        held: dict[Any, int] = {}  # the bytes of results
        for step in program.steps:
            results = self.run_equation(step, [values[name] for name in step.inputs], mesh)
            for variable, result in zip(step.equation.outvars, results, strict=True):
                values[variable], held[variable] = result, _count_bytes(result)
                self._live += held[variable]
            if self._live > self._memory:
                self._reject_size(step.equation)
            for variable in step.last_uses:
                values.pop(variable)
                self._live -= held.pop(variable, 0)
        self._live -= sum(held.values())  # the caller counts them again
        return [values[name] for name in program.outputs]

    def _reject_size(self, equation) -> NoReturn:
        raise RunError(
            f"the program's arrays take {format_bytes(self._live)} at {self._find_line(equation)}, and "
            f"{format_bytes(int(self._memory))} are allowed; raise the limit, or take a smaller model or mesh"
        )

    def run_equation(self, step: Step, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Returns the results of one equation on all devices."""
        equation = step.equation
        if self._watch:
            self._watch(equation)
        self._running.append(equation)
        results = step.run(self, equation, inputs, mesh)
        self._running.pop()
        if self._change:
            results = self._change(equation, inputs, results, mesh)
        return results

    def _find_line(self, equation) -> str:
        """Returns the line of a running operation; in a function that JAX itself jits, the line that calls it."""
        lines = map(find_line, [equation, *reversed(self._running)])
        return next((line for line in lines if line != "?"), "?")

    def apply_rule(self, operation: Operation, equation, arrays: list[ndarray]) -> list[ndarray]:
        """Returns the results of the rule of an operation."""
        try:
            results = RULES[operation.name](operation, *arrays)
        except NotImplementedError as error:
            raise UsageError(
                f"the exact interpreter cannot run {operation.name} with {error}; {self._find_line(equation)} uses it"
            ) from None
        results = results if isinstance(results, (tuple, list)) else (results,)
        return [self._store(x, aval, equation, operation.mesh)
                for x, aval in zip(results, operation.outputs, strict=True)]  # fmt: skip

    def reject(self, equation, inputs: list[ndarray], mesh: Mesh) -> NoReturn:
        """Raises UsageError for an operation without a rule."""
        raise UsageError(
            f"the exact interpreter has no rule for the operation {equation.primitive.name}, which "
            f"{self._find_line(equation)} uses; please report it, or run the program with devices"
        )

    def _store(self, result, aval, equation, mesh: Mesh) -> ndarray:
        """Returns a result in its dtype, rounded to what the program stores if `floats` is "stored"."""
        wanted = working_dtype(aval.dtype)
        result = np.asarray(result, wanted)
        if self._rounds and is_float(aval.dtype):
            result = result.astype(aval.dtype).astype(wanted)
        own = result.shape[len(mesh) :]
        assert own == aval.shape, f"the rule of {equation.primitive.name} has shape {own}, expected {aval.shape}"
        return result

    # Collectives

    def communicate(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs a collective, and counts what it sends."""
        name, p = equation.primitive.name, equation.params
        axes = jaxprs.find_axes(equation)
        if missing := [axis for axis in axes if axis not in mesh]:
            raise UsageError(
                f"{self._find_line(equation)} names the axis {missing[0]}, which no shard_map around it has"
            )
        collectives = Collectives(mesh, axes, p.get("axis_index_groups"))
        if name == "axis_index":
            return [collectives.index()]
        self._count(equation, axes, mesh)
        results = []
        for x, atom, variable in zip(inputs, equation.invars, equation.outvars, strict=True):
            if own := own_axes(len(atom.aval.shape), jaxprs.find_own_axes(equation)):
                x = REDUCTIONS.get(name, np.add).reduce(x, axis=own, dtype=x.dtype)
            results.append(self._store(_communicate(collectives, name, p, x), variable.aval, equation, mesh))
        return results

    def _count(self, equation, axes: tuple[str, ...], mesh: Mesh) -> None:
        if math.prod(mesh[axis] for axis in axes) == 1:
            return
        for variable in equation.outvars:
            kind = jaxprs.COLLECTIVES[equation.primitive.name]
            pairs = tuple(map(tuple, equation.params.get("perm", ())))
            sent = Sent(kind, axes, variable.aval.shape, variable.aval.dtype.name, pairs, self._find_line(equation), 1)
            self._sent[sent] = self._sent.get(sent, 0) + 1

    # Control flow

    def run_scan(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs the body `length` times."""
        p, loop = equation.params, jaxprs.read_loop(equation)
        assert loop is not None
        constants = inputs[: loop.constants]
        carried = inputs[loop.constants : loop.constants + loop.carried]
        scanned, k, length = inputs[loop.constants + loop.carried :], len(mesh), p["length"]
        stacks: list[list] = [[None] * length for _ in equation.outvars[loop.carried :]]
        for i in range(length - 1, -1, -1) if p["reverse"] else range(length):
            slices = [x[(slice(None),) * k + (i,)] for x in scanned]
            results = self.run_closed(p["jaxpr"], [*constants, *carried, *slices], mesh)
            carried = results[: loop.carried]
            for stack, result in zip(stacks, results[loop.carried :], strict=True):
                stack[i] = result
        stacked = [
            _stack(stack, variable.aval, k)
            for stack, variable in zip(stacks, equation.outvars[loop.carried :], strict=True)
        ]
        return [*carried, *stacked]

    def run_while(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs the body on all devices until the last one has finished; finished devices keep their values.

        Under vmap a condition has axes of its own, the first ones of all carried arrays.
        """
        p = equation.params
        before, after = p["cond_nconsts"], p["body_nconsts"]
        condition, constants, carried = inputs[:before], inputs[before : before + after], inputs[before + after :]
        own = len(p["cond_jaxpr"].out_avals[0].shape)
        ranks = [len(variable.aval.shape) - own for variable in equation.outvars]
        while True:
            (goes_on,) = self.run_closed(p["cond_jaxpr"], [*condition, *carried], mesh)
            if not goes_on.any():
                return carried
            results = self.run_closed(p["body_jaxpr"], [*constants, *carried], mesh)
            if not goes_on.all():
                results = [_where(goes_on, new, old, rank)
                           for new, old, rank in zip(results, carried, ranks, strict=True)]  # fmt: skip
            carried = results

    def run_cond(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs each branch that a device takes, and gives each device the results of its own."""
        which, *operands = inputs
        branches = equation.params["branches"]
        chosen = np.clip(which.astype(np.int64), 0, len(branches) - 1)
        taken = np.unique(chosen)
        results = self.run_closed(branches[int(taken[0])], operands, mesh)
        for branch in taken[1:]:
            others = self.run_closed(branches[int(branch)], operands, mesh)
            results = [_where(chosen == branch, new, old, len(variable.aval.shape))
                       for new, old, variable in zip(others, results, equation.outvars, strict=True)]  # fmt: skip
        return results

    def run_shard_map(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Splits the arguments, runs the body on all devices, and joins the results."""
        program = jaxprs.read_shard_map(equation)
        inside = mesh | program.mesh
        blocks = [
            split(x, len(atom.aval.shape), spec, program.mesh)
            for x, atom, spec in zip(inputs, equation.invars, program.in_specs, strict=True)
        ]
        results, joined = self.run_jaxpr(program.body, [], blocks, inside), []
        for number, (x, spec, variable) in enumerate(zip(results, program.out_specs, equation.outvars, strict=True)):
            rank = len(variable.aval.shape)
            for axis, difference in find_differing(x, rank, spec, program.mesh).items():
                self.disagreements.append(Disagreement(number, axis, difference))
            joined.append(join(x, rank, spec, program.mesh))
        return joined

    def choose_platform(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Returns the number of the default branch, else of that for a CPU, which may round products to digits."""
        platforms = equation.params["platforms"]
        named = [i for i, names in enumerate(platforms) if names is not None and "cpu" in names]
        default = [i for i, names in enumerate(platforms) if names is None]
        return [add_mesh_axes(np.asarray([*default, *named][0], np.int32), mesh)]

    def run_linear_solve(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs the given solver; the products that it inverts serve gradients only."""
        lengths = equation.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        constants, right_sides = inputs[first : first + lengths.solve], inputs[sum(lengths) :]
        return self.run_closed(equation.params["jaxprs"].solve, [*constants, *right_sides], mesh)

    def run_batched(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Runs a function with a rule of its own for vmap, which plays no role here."""
        return self.run_closed(equation.params["call"], inputs, mesh)

    def run_named_product(self, equation, inputs: list[ndarray], mesh: Mesh) -> list[ndarray]:
        """Multiplies, and sums over the named axes: jnp.dot over an xmap's axis, under shardformer.legacy."""
        p = equation.params
        inputs_avals = tuple(atom.aval for atom in equation.invars)
        operation = Operation("dot_general", {}, inputs_avals, (equation.outvars[0].aval,), mesh)
        product = products.multiply(operation, *inputs, *p["dimensions"])
        return [Collectives(mesh, p["names"]).reduce(product, np.add) if p["names"] else product]


CONTROL_FLOW: dict[str, Callable] = {
    "scan": Interpreter.run_scan,
    "while": Interpreter.run_while,
    "cond": Interpreter.run_cond,
    "shard_map": Interpreter.run_shard_map,
    "platform_index": Interpreter.choose_platform,
    "custom_linear_solve": Interpreter.run_linear_solve,
    "custom_vmap_call": Interpreter.run_batched,
    "pdot": Interpreter.run_named_product,
}


def choose_runner(equation) -> Callable:
    """Returns the function (interpreter, equation, inputs, mesh) -> results of an equation."""
    name, params = equation.primitive.name, equation.params
    if name in CONTROL_FLOW:
        return CONTROL_FLOW[name]
    if name in jaxprs.COLLECTIVES or name == "axis_index":
        return Interpreter.communicate
    if (function := jaxprs.called_closed(equation)) is not None:
        return lambda interpreter, _, inputs, mesh: interpreter.run_closed(function, inputs, mesh)
    if name not in RULES:
        return Interpreter.reject
    inputs = tuple(atom.aval for atom in equation.invars)
    outputs = tuple(variable.aval for variable in equation.outvars)
    if name == "pvary":  # a quarter of a program's equations
        return lambda interpreter, equation, inputs, mesh: inputs

    def apply(interpreter: Interpreter, equation, arrays: list[ndarray], mesh: Mesh) -> list[ndarray]:
        return interpreter.apply_rule(Operation(name, params, inputs, outputs, mesh), equation, arrays)

    return apply


REDUCTIONS: dict[str, np.ufunc] = {"pmax": np.maximum, "pmin": np.minimum}  # all others add


def _communicate(collectives: Collectives, name: str, p: dict, x: ndarray) -> ndarray:
    kind = jaxprs.COLLECTIVES[name]
    if kind == "all-reduce":
        return collectives.reduce(x, REDUCTIONS.get(name, np.add))
    if kind == "all-gather":
        return collectives.gather(x, p["all_gather_dimension"], p["tiled"])
    if kind == "reduce-scatter":
        return collectives.reduce_scatter(x, p["scatter_dimension"], p["tiled"])
    if kind == "all-to-all":
        return collectives.all_to_all(x, p["split_axis"], p["concat_axis"])
    return collectives.permute(x, p["perm"])


def _where(which: ndarray, new: ndarray, old: ndarray, rank: int) -> ndarray:
    """Chooses between the results of devices."""
    return np.where(which.reshape((*which.shape, *[1] * rank)), new, old)


def _stack(arrays: list, aval, k: int) -> ndarray:
    """Stacks the results of a scan before their own axes."""
    if not arrays:
        return np.zeros((*[1] * k, *aval.shape), working_dtype(aval.dtype))
    prefix = np.broadcast_shapes(*(x.shape[:k] for x in arrays))
    return np.stack([np.broadcast_to(x, (*prefix, *x.shape[k:])) for x in arrays], axis=k)


def _count_bytes(x: ndarray) -> int:
    """Returns the bytes of an array's memory; a view has none of its own."""
    return x.nbytes if x.base is None else 0
