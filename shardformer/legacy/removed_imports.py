"""Errors with advice: after `install()`, the error about a removed name that stays away names today's spelling."""

import contextlib
import dis
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable

from shardformer.legacy.lost_names import NOT_COVERED
from shardformer.legacy.removed_names import today


def advise_about_names(stack: contextlib.ExitStack, library: str) -> None:
    """Makes attributes of a library's modules fail with the advice of the table, until `stack` closes."""
    by_home: dict[str, list[str]] = {}
    for name in NOT_COVERED:
        home, _, attribute = name.rpartition(".")
        if home.partition(".")[0] == library:
            by_home.setdefault(home, []).append(attribute)
    for home, attributes in by_home.items():
        module = _loaded(home)
        if module is not None:
            answer_with_advice(stack, module, frozenset(attributes), home)


def advise_about_modules(stack: contextlib.ExitStack) -> None:
    """Makes imports of removed modules fail with the advice of the table, until `stack` closes."""
    finder = _RemovedModules()
    sys.meta_path.append(finder)
    stack.callback(sys.meta_path.remove, finder)


def _loaded(home: str) -> types.ModuleType | None:
    """Returns a module of jax; of another library only if the program has imported it."""
    if home.partition(".")[0] != "jax":
        return sys.modules.get(home)
    try:
        module = importlib.import_module(home)
    except ImportError:
        return None
    return module if isinstance(module, types.ModuleType) else None


def answer_with_advice(
    stack: contextlib.ExitStack, module: types.ModuleType, removed: frozenset[str], name: str = ""
) -> None:
    """Makes the attributes `removed` of a module fail with advice, until `stack` closes.

    name: of the module in the message; "" for its own.
    """
    before: Callable[[str], object] | None = vars(module).get("__getattr__")

    def getattr_with_advice(attribute: str):
        if attribute in removed:
            message = _message(f"{name or module.__name__}.{attribute}")
            if _is_import_statement(sys._getframe(1)):
                raise ImportError(message, name=module.__name__)
            raise AttributeError(message)
        if before is not None:
            return before(attribute)
        raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")

    if before is None:
        stack.callback(delattr, module, "__getattr__")
    else:
        stack.callback(setattr, module, "__getattr__", before)
    module.__getattr__ = getattr_with_advice  # type: ignore[method-assign]


def _is_import_statement(frame: types.FrameType) -> bool:
    """Returns True while `from module import name` runs: an AttributeError would lose its message there."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


class _RemovedModules(importlib.abc.MetaPathFinder):
    """The last finder: `import jax.experimental.loops` fails with the advice of the table."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in NOT_COVERED and importing_file() is not None:
            raise ModuleNotFoundError(_message(fullname), name=fullname)


def importing_file() -> str | None:
    """Returns the file that imports now; None outside of an import: importlib.util.find_spec asks finders too."""
    frame: types.FrameType | None = sys._getframe(2)
    importing = False
    while frame is not None and "importlib" in frame.f_code.co_filename:
        importing = importing or frame.f_code.co_name == "_find_and_load_unlocked"
        frame = frame.f_back
    return frame.f_code.co_filename if importing and frame is not None else None


def _message(name: str) -> str:
    return f"{name} was removed, and shardformer.legacy does not put it back; write {today(name)}"
