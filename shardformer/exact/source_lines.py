"""The lines of a user's program that an operation comes from."""

import functools
import sysconfig
import traceback
from pathlib import Path

import haiku
import jax
import optax

LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (jax, haiku, optax))
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def find_line(equation) -> str:
    """Returns 'file.py:57 (function)' of the innermost call outside of JAX, Haiku and optax; '?' if unknown."""
    return next(iter(find_calls(equation)), "?")


def find_calls(equation) -> tuple[str, ...]:
    """Returns the calls outside of JAX, Haiku and optax that led to an operation, the innermost first."""
    found = equation.source_info.traceback
    return _find_calls(found) if found is not None else ()


def find_positions(equation) -> tuple[int, ...]:
    """Returns the position of each call in its function: two psums on one line differ in it."""
    found = equation.source_info.traceback
    return tuple(found.raw_frames()[1]) if found is not None else ()


def describe_calls(calls: tuple[str, ...], most: int = 3) -> str:
    """Returns 'linear.py:24 (linear), called from layer.py:57 (branch), ...'."""
    return ", called from ".join(calls[:most]) or "?"


def find_error_line(error: BaseException) -> str:
    """Returns the innermost line outside of JAX, Haiku and optax that an error passed through."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{_shorten(f.filename)}:{f.lineno} ({f.name})" for f in frames if _is_user_code(f.filename)), "?")


@functools.lru_cache(maxsize=65_536)
def _find_calls(of_operation) -> tuple[str, ...]:
    return tuple(
        f"{_shorten(frame.file_name)}:{frame.line_num} ({frame.function_name})"
        for frame in of_operation.frames
        if _is_user_code(frame.file_name)
    )


def _is_user_code(path: str) -> bool:
    is_standard = path.startswith(STANDARD_LIBRARY) and "site-packages" not in path
    return not is_standard and not path.startswith((*LIBRARIES, "<"))


@functools.cache
def _shorten(path: str) -> str:
    """Returns the path relative to the working directory, if the file is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
