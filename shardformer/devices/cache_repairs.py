"""Two repairs of JAX's cache of compiled programs, each by an assignment to a module of another library.

`test_cache_of_jax_still_needs_both_repairs` fails when one can be removed.
"""

import contextlib
import functools
import glob
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardformer.devices.program_folder import say_not_stored

PROBLEM = re.compile(
    r"Error (?P<action>reading|writing) persistent compilation cache entry for '(?P<program>.*?)': (?P<why>.*)",
    re.DOTALL,
)


@functools.cache
def add_checksums() -> None:
    """Makes zstandard, if JAX packs programs with it, add a checksum: a flipped bit in a program ends the process.

    Remove it when JAX packs its entries with a checksum.
    """
    with contextlib.suppress(ImportError):
        import zstandard

        module: Any = zstandard
        module.ZstdCompressor = functools.partial(zstandard.ZstdCompressor, write_checksum=True)


def replace_damaged_entries(folder: Path) -> None:
    """Makes JAX's warnings about the cache in a folder delete damaged entries, and be one line each.

    JAX never rewrites an entry: a deleted one is replaced by the program that is compiled now. Remove it when JAX
    replaces damaged entries.
    """
    warnings.showwarning = _CacheWarnings(folder, warnings.showwarning)


class _CacheWarnings:
    """Handles JAX's warnings about its cache, and shows every other warning by `show`."""

    def __init__(self, folder: Path, show: Callable):
        self._folder, self._show = folder, show
        self._is_stored = True

    def __call__(self, message, *details, **more) -> None:
        result = PROBLEM.match(str(message))
        if not result:
            self._show(message, *details, **more)
        elif result["action"] == "reading":
            self._delete(result["program"])
        elif self._is_stored:
            self._is_stored = False
            say_not_stored(result["why"].partition("\n")[0])

    def _delete(self, program: str) -> None:
        print(f"a kept program is damaged and is compiled again: {program}", file=sys.stderr, flush=True)
        for entry in self._folder.glob(f"{glob.escape(program)}-*-cache"):
            with contextlib.suppress(OSError):
                entry.unlink()
