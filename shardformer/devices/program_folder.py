"""The folder of compiled programs, in which only its user may write, and two repairs of JAX's cache in it.

Each repair is an assignment to a module of another library; `test_cache_of_jax_still_needs_both_repairs` fails when one
can be removed.
"""

import contextlib
import functools
import glob
import grp
import os
import pwd
import re
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardformer.files import make_folder
from shardformer.messages import log


def find_danger(folder: Path) -> str:
    """Returns why programs in a folder on a disk may come from another user; an empty text if they cannot.

    Whoever can write in a parent can replace it by another folder, unless the parent is sticky, as /tmp is.
    """
    real = folder.resolve()
    for path in dict.fromkeys((real, *real.parents, *folder.absolute().parents)):
        try:
            result = path.stat()
        except OSError:  # it is created with the first program
            continue
        if not stat.S_ISDIR(result.st_mode):  # writing reports it
            continue
        if result.st_uid != os.getuid() and (path == real or result.st_uid):
            return f"{path} belongs to another user, whose programs would run here"
        if result.st_mode & stat.S_ISVTX and path != real:
            continue
        if result.st_mode & stat.S_IWOTH:
            return f"every user can write in {path}, and its programs would run here"
        if result.st_mode & stat.S_IWGRP and not _is_own_group(result.st_gid):
            return f"the group of {path} can write in it, and its programs would run here"
    return ""


def _is_own_group(group: int) -> bool:
    """Returns whether only this user is in a group: many systems give every user one of the same name."""
    try:
        user, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_named_so = user.pw_gid == group and entry.gr_name == user.pw_name
    return is_named_so and not set(entry.gr_mem) - {user.pw_name}


def make_private_folder(folder: Path) -> None:
    """Makes a folder of programs, in which only this user can write."""
    if folder in make_folder(folder):
        folder.chmod(stat.S_IRWXU)


def say_not_stored(why: str) -> None:
    """Prints why programs are not saved, and what the user can do."""
    log.warning(
        f"compiled programs are not kept: {why}; program_cache=FOLDER keeps them elsewhere, "
        "program_cache=none keeps none"
    )


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
        log.warning(f"a kept program is damaged and is compiled again: {program}")
        for entry in self._folder.glob(f"{glob.escape(program)}-*-cache"):
            with contextlib.suppress(OSError):
                entry.unlink()
