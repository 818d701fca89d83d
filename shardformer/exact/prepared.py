"""A jaxpr in the form in which it runs: what all runs of an equation share is found once."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from numpy import ndarray

from shardformer.exact import random_bits
from shardformer.exact.lockstep import Mesh
from shardformer.exact.operations import working_dtype


class Step(NamedTuple):
    """One equation of a program."""

    equation: Any
    run: Callable  # (interpreter, equation, arrays, mesh) -> results
    inputs: list  # variables, or the numbers of literals
    last_uses: list  # the variables that no later equation reads


class Program:
    """The steps of a jaxpr."""

    def __init__(self, jaxpr, choose: Callable[[Any], Callable]):
        """`choose` returns the function that runs an equation."""
        self._literals: list[ndarray] = []
        self._of_rank: dict[int, dict] = {}
        last_uses = _find_last_uses(jaxpr)
        self.steps = [
            Step(equation, choose(equation), list(map(self._name, equation.invars)), last_uses.get(number, []))
            for number, equation in enumerate(jaxpr.eqns)
        ]
        self.outputs = list(map(self._name, jaxpr.outvars))

    def _name(self, atom):
        if not isinstance(atom, core.Literal):
            return atom
        dtype = atom.aval.dtype  # type: ignore[attr-defined]
        # JAX may keep a Python number with more digits than the program has.
        self._literals.append(widen(np.asarray(atom.val, dtype), dtype))
        return len(self._literals) - 1

    def start(self, mesh: Mesh) -> dict:
        """Returns the literals under their numbers, to which a run adds its variables."""
        if len(mesh) not in self._of_rank:
            self._of_rank[len(mesh)] = {i: add_mesh_axes(x, mesh) for i, x in enumerate(self._literals)}
        return self._of_rank[len(mesh)].copy()


_programs: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def prepare(jaxpr, choose: Callable[[Any], Callable]) -> Program:
    """Returns the program of a jaxpr; a loop's body and a step of a training run again and again."""
    if jaxpr not in _programs:
        _programs[jaxpr] = Program(jaxpr, choose)
    return _programs[jaxpr]


def _find_last_uses(jaxpr) -> dict[int, list]:
    """Returns the variables that no equation after each one reads."""
    outputs = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for variable in (*equation.invars, *equation.outvars):
            if not isinstance(variable, core.Literal):
                last[variable] = number
    result: dict[int, list] = {}
    for variable, number in last.items():
        if variable not in outputs:
            result.setdefault(number, []).append(variable)
    return result


def widen(value, dtype) -> ndarray:
    """Returns a value as an array in the dtype that rules compute in."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and not isinstance(value, ndarray):
        words = np.asarray(jax.random.key_data(value))
        return random_bits.make_key(words[..., 0], words[..., 1])
    return np.asarray(value).astype(working_dtype(dtype), copy=False)


def add_mesh_axes(x: ndarray, mesh: Mesh) -> ndarray:
    """Returns a value that is the same on all devices."""
    return x.reshape((*[1] * len(mesh), *x.shape))
