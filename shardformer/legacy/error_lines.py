"""Shortened tracebacks: an error in an xmapped function ends in the line that the caller wrote."""

import traceback
import types

import jax

LIBRARIES = "jax", "jaxlib", "numpy", "opt_einsum", "shardformer"


def end_in_callers_code(result: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback without the library frames after the last frame of the caller's own code.

    The traceback stays complete if it has no such frame, or if jax_traceback_filtering is "off".
    """
    frames: list[types.TracebackType] = []
    entry = result
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    defined = [number for number, entry in enumerate(frames) if not _is_of_a_library(entry.tb_frame)]
    filtering = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]  # jax adds options as attributes
    if not defined or filtering == "off":
        return result
    shortened: types.TracebackType | None = None
    for entry in reversed(frames[: defined[-1] + 1]):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def raised_by_jax(error: Exception) -> bool:
    """Returns True if jax itself raised the error, and not the mapped function."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _library(frames[-1]) == "jax"


def _is_of_a_library(frame: types.FrameType) -> bool:
    return _library(frame) in LIBRARIES or frame.f_code.co_filename.startswith("<frozen")


def _library(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
