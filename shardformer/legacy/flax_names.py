"""`flax.optim`, `flax.nn` and `flax.deprecated.nn` come back when a program imports flax."""

import contextlib
import importlib
import sys
import types

from shardformer.legacy import installed_libraries, removed_imports
from shardformer.legacy.after_import import complete_after_import
from shardformer.legacy.lost_names import NOT_COVERED


def put_back(stack: contextlib.ExitStack) -> None:
    """Adds the names to flax now, or when a program imports it, until `stack` closes."""
    complete_after_import("flax", lambda flax: _complete(flax, stack), stack)


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
