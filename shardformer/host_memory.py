"""The host's memory, where CPU devices compute in it."""

import ctypes
import importlib.metadata
import importlib.util
import os

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep the memory that a step frees, for the next one; whether it will. Call before any thread
    starts, so before any device is touched.

    glibc gives large blocks back to the system at once, which then hands them out anew in pages of 4 KB, each with
    an interrupt and cleared: a quarter of a step's time. The settings of malloc that a user chose are left alone.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if chosen or mallopt is None:
        return False
    # One heap that never shrinks and has every block: those of other threads' arenas are at most 64 MB.
    return all(mallopt(option, value) for option, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, -1)))


def cpu_computes(platforms: str | None) -> bool:
    """Whether JAX, told to use these platforms, will compute on the CPU, as far as is known before its devices are."""
    if platforms:
        return platforms.startswith("cpu")
    return not importlib.util.find_spec("libtpu") and not importlib.metadata.entry_points(group="jax_plugins")
