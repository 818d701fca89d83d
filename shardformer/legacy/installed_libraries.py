"""What the installed jax, optax and haiku have: `--check` asks them about the names that are in none of its tables."""

import functools
import importlib
import types
import warnings
from typing import Any

LIBRARIES = "haiku", "jax", "jaxlib", "optax"


@functools.cache
def missing(name: str) -> str | None:
    """A dotted name up to the part that its library lacks; None where it lacks nothing, or cannot be asked."""
    library, *parts = name.split(".")
    if library not in LIBRARIES:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is there, and about to go
        try:
            found, spelled = importlib.import_module(library), library
            for part in parts:
                if not isinstance(found, types.ModuleType):
                    return None  # what an object has, only a run can tell
                spelled = f"{spelled}.{part}"
                found = _inside(found, part)
        except _Missing:
            return spelled
        except Exception:
            return None  # a part of it that imports what is not installed here
    return None


def version(name: str) -> str:
    """The library of a dotted name and its version."""
    library = name.partition(".")[0]
    return f"{library} {importlib.import_module(library).__version__}"


class _Missing(Exception):
    pass


def _inside(module: types.ModuleType, part: str) -> Any:
    if hasattr(module, part):
        return getattr(module, part)
    submodule = f"{module.__name__}.{part}"
    try:
        return importlib.import_module(submodule)
    except ModuleNotFoundError as error:
        if error.name == submodule:
            raise _Missing from None
        raise
