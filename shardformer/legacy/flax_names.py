"""`flax.optim` and `flax.nn` come back when a program imports flax; `install()` itself does not import flax."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

# The names of the old flax.nn that are functions, and so still mean the same.
ACTIVATIONS = """
celu elu gelu glu leaky_relu log_sigmoid log_softmax relu sigmoid soft_sign softmax softplus standardize swish silu tanh
"""


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
        _put(flax, "nn", _activations(), stack)


def _activations() -> types.ModuleType:
    home = importlib.import_module("jax.nn")
    module = types.ModuleType("flax.nn", "The activations of flax.nn.")
    vars(module).update({name: getattr(home, name) for name in ACTIVATIONS.split() if hasattr(home, name)})
    module.__getattr__ = _explain  # type: ignore[method-assign]
    return module


def _explain(name: str):
    raise AttributeError(f"flax.nn.{name} was removed, and shardformer.legacy does not put it back; write flax.linen")


def _put(flax: types.ModuleType, name: str, module: types.ModuleType, stack: contextlib.ExitStack) -> None:
    setattr(flax, name, module)
    sys.modules[f"flax.{name}"] = module
    stack.callback(sys.modules.pop, f"flax.{name}", None)
    stack.callback(delattr, flax, name)
