"""Where the traceback of an error in an xmapped function ends: in the line that the caller wrote."""

import types

import jax

LIBRARIES = "jax", "jaxlib", "numpy", "opt_einsum", "shardformer"


def end_in_callers_code(traceback: types.TracebackType) -> types.TracebackType:
    """The traceback without the frames of libraries after the last one of the caller's own code.

    All of it where there is no such frame behind the first one, or where jax is set to filter nothing.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    own = [number for number, entry in enumerate(frames) if not _is_of_a_library(entry.tb_frame)]
    if not own or jax.config.jax_traceback_filtering == "off":
        return frames[0]
    shortened = None
    for entry in reversed(frames[: own[-1] + 1]):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def raised_by_jax(error: Exception) -> bool:
    """Whether jax itself raised it, and not the function that is mapped."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return _library(last.tb_frame) == "jax"


def _is_of_a_library(frame: types.FrameType) -> bool:
    return _library(frame) in LIBRARIES or frame.f_code.co_filename.startswith("<frozen")


def _library(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
