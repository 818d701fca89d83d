"""The lines of a user's program that an operation comes from."""

import functools
import sysconfig
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
    traceback = equation.source_info.traceback
    return _find_calls(traceback) if traceback is not None else ()


def find_positions(equation) -> tuple[int, ...]:
    """Returns the position of each call in its function: two psums on one line differ in it."""
    traceback = equation.source_info.traceback
    return tuple(traceback.raw_frames()[1]) if traceback is not None else ()


def describe_calls(calls: tuple[str, ...], most: int = 3) -> str:
    """Returns 'linear.py:24 (linear), called from layer.py:57 (branch), ...'."""
    return ", called from ".join(calls[:most]) or "?"


@functools.lru_cache(maxsize=65_536)
def _find_calls(traceback) -> tuple[str, ...]:
    return tuple(
        f"{_shorten(frame.file_name)}:{frame.line_num} ({frame.function_name})"
        for frame in traceback.frames
        if not frame.file_name.startswith((*LIBRARIES, "<")) and not _is_standard(frame.file_name)
    )


def _is_standard(path: str) -> bool:
    return path.startswith(STANDARD_LIBRARY) and "site-packages" not in path


@functools.cache
def _shorten(path: str) -> str:
    """Returns the path relative to the working directory, if the file is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
