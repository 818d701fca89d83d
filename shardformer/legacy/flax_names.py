"""`flax.optim`, `flax.nn` and `flax.deprecated.nn` come back when a program imports flax.

`install()` itself does not import flax.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

from shardformer.legacy import installed_libraries, removed_imports
from shardformer.legacy.lost_names import NOT_COVERED


def put_back(stack: contextlib.ExitStack) -> None:
    """Adds the names to flax now, or when a program imports it, until `stack` closes."""
    if "flax" in sys.modules:
        _complete(sys.modules["flax"], stack)
        return
    finder = _Flax(stack)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


class _Flax(importlib.abc.MetaPathFinder):
    """Finds flax where Python would, with a loader that completes it."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "flax":
            return None
        spec = importlib.machinery.PathFinder.find_spec("flax", path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_complete(module):
                execute(module)
                _complete(module, self._stack)

            spec.loader.exec_module = execute_and_complete
        return spec


def _complete(flax: types.ModuleType, stack: contextlib.ExitStack) -> None:
    if not hasattr(flax, "optim"):
        optim = importlib.import_module("shardformer.legacy.flax_optim")
        optim.register_checkpoints(importlib.import_module("flax.serialization"))
        _put(flax, "optim", optim, stack)
        lost = frozenset(name.removeprefix("flax.optim.") for name in NOT_COVERED if name.startswith("flax.optim."))
        removed_imports.answer_with_advice(stack, optim, lost, "flax.optim")
    nn = types.ModuleType("flax.nn", "The functions of flax.nn.")
    vars(nn).update(vars(importlib.import_module("shardformer.legacy.flax_nn")) | {"__name__": "flax.nn"})
    nn.__getattr__ = _explain  # type: ignore[method-assign]
    if not hasattr(flax, "nn"):
        _put(flax, "nn", nn, stack)
    if not hasattr(flax, "deprecated"):
        deprecated = types.ModuleType("flax.deprecated", "The functions of flax.deprecated.nn.")
        _put(flax, "deprecated", deprecated, stack)
        _put(deprecated, "nn", nn, stack)


def _explain(name: str):
    raise AttributeError(f"flax.nn.{name} was removed, and shardformer.legacy does not put it back; write flax.linen")


def _put(home: types.ModuleType, name: str, module: types.ModuleType, stack: contextlib.ExitStack) -> None:
    setattr(home, name, module)
    sys.modules[f"{home.__name__}.{name}"] = module
    stack.callback(sys.modules.pop, f"{home.__name__}.{name}", None)
    stack.callback(delattr, home, name)
    installed_libraries.put_back.add(f"{home.__name__}.{name}")
