"""The folder of compiled programs: only its user may write in it."""

import grp
import os
import pwd
import stat
import sys
from pathlib import Path

from shardformer.files import make_folder


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
    print(
        f"compiled programs are not kept: {why}; program_cache=FOLDER keeps them elsewhere, "
        "program_cache=none keeps none",
        file=sys.stderr,
        flush=True,
    )
