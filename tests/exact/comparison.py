"""Compares the interpreter's rules with XLA: many functions in one program, on one device and on a mesh of four.

On the mesh, the arguments of a function differ along some mesh axes and are the same along others, so that the rules
see mesh axes of every size.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardformer.exact import jaxprs
from shardformer.exact.interpreter import run_jaxpr
from shardformer.exact.operations import RULES, Operation, is_float

Draw = Callable[[np.random.RandomState], np.ndarray]
AXES = "a", "b"
MESH = AbstractMesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)


class Case(NamedTuple):
    """A function of arrays, and how its arguments are drawn on each device."""

    function: Callable
    draws: tuple[Draw, ...]
    most: float | None = None  # the largest relative difference of floats


def case(function: Callable, *draws: Draw, most: float | None = None) -> Case:
    return Case(function, draws, most)


def floats(*shape: int, low: float = -3, high: float = 3, dtype=np.float64) -> Draw:
    return lambda random: random.uniform(low, high, shape).astype(dtype)


def integers(*shape: int, low: int = -9, high: int = 9, dtype=np.int32) -> Draw:
    """Draws integers from `low` to `high`."""
    return lambda random: random.randint(low, high + 1, shape).astype(dtype)


def booleans(*shape: int) -> Draw:
    return lambda random: random.rand(*shape) < 0.5


def bits(*shape: int, dtype=np.int32) -> Draw:
    """Draws integers of all bits, among them the smallest, the largest, 0 and -1."""
    size = int(np.prod(shape))
    extremes = [np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1] + [-1] * (np.dtype(dtype).kind == "i")

    def draw(random):
        drawn = np.frombuffer(random.bytes(size * np.dtype(dtype).itemsize), dtype).copy()
        places = random.permutation(size)[: len(extremes)]
        drawn[places] = np.array(extremes, dtype)[: len(places)]
        return drawn.reshape(shape)

    return draw


def shuffled(*values, dtype=np.float64) -> Draw:
    """Draws these values in another order on each device."""
    return lambda random: random.permutation(np.array(values, np.float64)).astype(dtype)


def distinct(*shape: int, dtype=np.float64) -> Draw:
    """Draws each number from 0 once."""
    return lambda random: random.permutation(int(np.prod(shape))).reshape(shape).astype(dtype)


def use_float64() -> contextlib.AbstractContextManager:
    return jax.enable_x64(True)


class Comparison:
    """The results of XLA and the traced programs of some cases."""

    def __init__(self, cases: dict[str, Case], most: float = 1e-12, setting: Callable = use_float64):
        self._cases, self._most, self._setting = cases, most, setting
        with setting():
            functions = {name: case.function for name, case in cases.items()}
            program = jax.jit(lambda given: {name: jax.tree.leaves(f(*given[name])) for name, f in functions.items()})
            one = {name: _draw(case, i, ()) for i, (name, case) in enumerate(cases.items())}
            split = {name: _draw(case, i, (2, 2)) for i, (name, case) in enumerate(cases.items())}
            of_devices = [program(jax.tree.map(lambda x, at=at: _take(x, at), split)) for at in np.ndindex(2, 2)]
            self._expected = {
                "one device": jax.tree.map(np.asarray, program(one)),
                "mesh": jax.tree.map(lambda *each: np.stack(each).reshape(2, 2, *each[0].shape), *of_devices),
            }
            self._traced = {
                "one device": _trace(functions, one),
                "mesh": _trace({name: _spread(functions[name], split[name]) for name in cases}, split),
            }

    @property
    def operations(self) -> set[str]:
        """The names of all operations of the cases."""
        return {
            equation.primitive.name
            for closed, _ in self._traced["one device"].values()
            for inner in jaxprs.walk(closed.jaxpr)
            for equation in inner.eqns
        }

    def list_differences(self, where: str, only: str | None = None) -> Iterator[str]:
        """Yields the cases whose results are not XLA's, with how they differ; `only` those with an operation."""
        for name, (closed, arguments) in self._traced[where].items():
            if only and not _uses(closed, only):
                continue
            try:
                with self._setting():
                    got = run_jaxpr(closed, arguments).outputs
            except Exception as error:  # a wrong rule may also fail
                yield f"{name}: {error!r}"
                continue
            most = self._cases[name].most or self._most
            for number, (x, y) in enumerate(zip(got, self._expected[where][name], strict=True)):
                if difference := describe_difference(x, y, most):
                    yield f"{name}, result {number}: {difference}"


def _trace(functions: dict[str, Callable], arguments: dict[str, tuple]) -> dict[str, tuple]:
    """Returns each function's jaxpr and its arguments."""
    return {name: (jax.make_jaxpr(function)(*arguments[name]), arguments[name]) for name, function in functions.items()}


def _draw(case: Case, seed: int, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Draws the arguments. On a mesh, they have its axes first, of size 1 where they are the same on its devices."""
    result = []
    for i, draw in enumerate(case.draws):
        random, differing = np.random.RandomState(1000 * seed + i), (seed + 3 * i) % 4
        own = [size if differing >> axis & 1 else 1 for axis, size in enumerate(sizes)]
        blocks = [np.asarray(draw(random)) for _ in range(math.prod(own))]
        result.append(np.stack(blocks).reshape((*own, *blocks[0].shape)))
    return tuple(result)


def _take(x: np.ndarray, device: tuple[int, int]) -> np.ndarray:
    """Returns the array of one device."""
    return x[tuple(min(i, size - 1) for i, size in zip(device, x.shape, strict=False))]


def _spread(function: Callable, arguments: tuple) -> Callable:
    """Returns the function for all devices of a mesh."""

    def apply(*blocks):
        results = jax.tree.leaves(function(*(block.reshape(block.shape[2:]) for block in blocks)))
        return [x.reshape((1, 1, *x.shape)) for x in results]

    specs = tuple(
        P(*(name if size > 1 else None for name, size in zip(AXES, x.shape, strict=False))) for x in arguments
    )
    return jax.shard_map(apply, mesh=MESH, in_specs=specs, out_specs=P(*AXES), check_vma=False)


def vary(x, axes):
    """Marks an array as varying over axes, which collectives and loops ask for under check_vma."""
    missing = {axes} if isinstance(axes, str) else {*axes}
    missing -= jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _uses(closed, name: str) -> bool:
    return any(equation.primitive.name == name for inner in jaxprs.walk(closed.jaxpr) for equation in inner.eqns)


def describe_difference(got: np.ndarray, expected: np.ndarray, most: float) -> str:
    """Returns how two arrays differ; "" if integers and bits are equal, and floats nearly."""
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    if not is_float(expected.dtype):
        wrong = np.asarray(got != expected)
    else:
        wide = expected.astype(np.complex128 if expected.dtype.kind == "c" else np.float64)
        close = np.isclose(got, wide, rtol=most, atol=most, equal_nan=True)
        wrong = ~close
    if not wrong.any():
        return ""
    return f"{got[wrong][:3]}, expected {expected[wrong][:3]} at {np.argwhere(wrong)[:3].tolist()}"


@contextlib.contextmanager
def perturbed(name: str) -> Iterator[None]:
    """Makes the rule of an operation slightly wrong."""
    rule = RULES[name]

    def wrong(operation: Operation, *arrays):
        results = rule(operation, *arrays)
        return tuple(map(_perturb, results)) if isinstance(results, tuple | list) else _perturb(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, name, wrong)
        yield


def _perturb(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.names:  # keys
        return np.flip(x.view(np.uint32).reshape((*x.shape, 2)), -1).copy().view(x.dtype)[..., 0]
    return ~x if x.dtype == bool else x + np.ones((), x.dtype) if x.dtype.kind not in "fc" else x * (1 + 1e-5) + 1e-5


def find_unnoticed(comparison: Comparison, names) -> list[str]:
    """Returns the operations whose rule may be wrong without a difference from XLA."""
    result = []
    for name in names:
        with perturbed(name):
            if not any(comparison.list_differences("one device", only=name)):
                result.append(name)
    return result


def rules_of(module) -> set[str]:
    """Returns the operations whose rules a module defines."""
    return {name for name, rule in RULES.items() if rule.__module__ == module.__name__}
