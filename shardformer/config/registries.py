"""The values of a key that are functions: each is registered in one file, and found there by its name.

`@ACTIVATIONS.register` above a function of `kernels/activations.py` makes its name a value of `activation=`. A function
names what it needs by its parameters. The file is read for this, not imported: it imports JAX.
"""

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardformer.errors import UsageError

F = TypeVar("F", bound=Callable)
PACKAGE = Path(__file__).parents[1]
ADDED: dict[str, dict[str, tuple[str, ...]]] = {}  # by file: the functions that programs register, as read_parameters
OWN = "own"  # stands in a stored config.json for FILE.py:NAME, as no stored run names code


class Registry(dict[str, Callable]):
    """The functions that are the values of a key, by name; `file` of this package registers its own."""

    def __init__(self, file: str):
        super().__init__()
        self._file = file

    def register(self, function: F) -> F:
        """Adds a function under its own name, which is a value of the key from then on; a decorator.

        A program adds its own before it makes a `Config`, and before it resumes a run that has one. A notebook may run
        the same definition again; another one under this name is rejected, as models may be traced with the first.

        >>> from shardformer import ACTIVATIONS, preset
        >>> @ACTIVATIONS.register
        ... def cube(x):
        ...     return x**3
        >>> preset("tiny", activation="cube").model.activation
        'cube'
        """
        name = function.__name__
        if name not in read_parameters(self._file):
            if name in self and _code(self[name]) != _code(function):
                raise UsageError(
                    f"{name} is registered already, with other code; give yours another name, or start Python again"
                )
            ADDED.setdefault(self._file, {})[name] = tuple(inspect.signature(function).parameters)
        elif name in self:
            raise UsageError(f"{name} is a function of this package already; give yours another name")
        self[name] = function
        return function


@functools.cache
def read_parameters(file: str) -> dict[str, tuple[str, ...]]:
    """Returns the names of the functions that a file of the package registers, each with those of its parameters."""
    module = ast.parse((PACKAGE / file).read_text("utf-8"))
    return {
        node.name: tuple(parameter.arg for parameter in node.args.args)
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Attribute) and mark.attr == "register" for mark in node.decorator_list)
    }


def _code(function: Callable) -> object:
    return getattr(function, "__code__", function)


def list_functions(file: str) -> dict[str, tuple[str, ...]]:
    """Returns the registered functions of a file and those that programs have added, with their parameters."""
    return read_parameters(file) | ADDED.get(file, {})


def is_of_a_program(file: str, name: str) -> bool:
    """Returns whether a program has registered a function of this name, besides those of a file of this package."""
    return name in ADDED.get(file, ())


def asks_for(file: str, name: str, parameter: str) -> bool:
    """Returns whether a registered function has a parameter of this name; False for a function that is not there."""
    return parameter in list_functions(file).get(name, ())


def call_with(function: Callable, available: dict):
    """Calls a function with those of the available arguments that its parameters name."""
    return function(**{name: available[name] for name in inspect.signature(function).parameters if name in available})


def names_code(value) -> bool:
    """Returns whether a value of a key is FILE.py:NAME, a function of the user's file."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return file.endswith(".py") and name.isidentifier()


def without_code(value):
    """Returns the value of a key as a run stores it."""
    return OWN if names_code(value) else value
