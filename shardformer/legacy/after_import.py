"""Completes a library when a program imports it: `install()` itself imports only jax and NumPy.

A release of haiku or optax as old as the program imports names of jax that have to be back before.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable

Complete = Callable[[types.ModuleType], None]


def complete_after_import(library: str, complete: Complete, stack: contextlib.ExitStack) -> None:
    """Calls `complete(module)` now if a library is imported, else after its import, until `stack` closes."""
    if library in sys.modules:
        complete(sys.modules[library])
        return
    finder = _Finder(library, complete)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one library where Python would, with a loader that completes it."""

    def __init__(self, library: str, complete: Complete):
        self._library, self._complete = library, complete

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._library:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_complete(module):
                execute(module)
                self._complete(module)

            spec.loader.exec_module = execute_and_complete
        return spec
