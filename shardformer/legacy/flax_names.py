"""`flax.optim` and `flax.nn` come back when a program imports flax; `install()` itself does not import flax."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types


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
    if not hasattr(flax, "nn"):
        _put(flax, "nn", importlib.import_module("shardformer.legacy.flax_nn"), stack)


def _put(flax: types.ModuleType, name: str, module: types.ModuleType, stack: contextlib.ExitStack) -> None:
    setattr(flax, name, module)
    sys.modules[f"flax.{name}"] = module
    stack.callback(sys.modules.pop, f"flax.{name}", None)
    stack.callback(delattr, flax, name)
