"""`jit`: jax.jit whose programs several processes load from the files of their previous start."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

from shardformer.programs.program_store import ProgramStore

_store: ProgramStore | None = None  # of this process; None keeps nothing


def use_store(store: ProgramStore | None) -> None:
    """Makes programs that `jit` returns from now on load and save in a store."""
    global _store
    _store = store


def jit(function: Callable, *, is_agreed: bool = True, **options: Any) -> Any:
    """Returns jax.jit(function, **options), which must have out_shardings; with a store, its KeptProgram.

    is_agreed: False for the program by which the processes agree; see ProgramStore.load_or_compile.
    """
    program = jax.jit(function, **options)
    return KeptProgram(program, options, _store, is_agreed) if _store else program


class KeptProgram:
    """A jitted function of positional arguments, whose compiled programs a store keeps. Keywords are static."""

    def __init__(self, jitted: Any, options: dict[str, Any], store: ProgramStore, is_agreed: bool):
        self._jitted, self._store, self._is_agreed = jitted, store, is_agreed
        self._options = options
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def lower(self, *arguments: Any, **static: Any) -> jax.stages.Lowered:
        """Returns the program for these arguments, lowered."""
        return self._jitted.lower(*arguments, **static)

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        signature = _describe(arguments, static)
        if signature not in self._programs:
            lowered = self.lower(*arguments, **static)
            devices = list(jax.tree.leaves(self._options["out_shardings"])[0].mesh.devices.flat)
            compiler_options = self._options.get("compiler_options")
            program = self._store.load_or_compile(lowered, devices, compiler_options, self._is_agreed)
            self._programs[signature] = program
        return self._programs[signature](*arguments)


def _describe(arguments: tuple, static: dict[str, Any]) -> Hashable:
    """Returns the types and shardings of the arguments, for each of which JAX compiles a program."""
    leaves, tree = jax.tree.flatten(arguments)
    types = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    return tree, types, tuple(sorted(static.items()))
