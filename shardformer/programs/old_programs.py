"""Files of compiled programs that no start has used for long. They are deleted, or their folder would grow for ever.

A start reads a program's file as a whole, and compiles a program that is missing: another start may delete it any time.
"""

import contextlib
import os
import re
import time
from pathlib import Path

from shardformer.storage import BucketPath, bucket

DAYS = 30
_PROGRAM = re.compile(r".+-[0-9a-f]{32}-\d+-of-\d+")


def note_use(path: Path | BucketPath) -> None:
    """Makes now the time of a file on a disk. An object in a bucket keeps the time at which it was written."""
    if isinstance(path, Path):
        with contextlib.suppress(OSError):
            os.utime(path)


def delete_unused(folder: Path | BucketPath) -> None:
    """Deletes the programs of all processes whose time is more than DAYS days ago; a failure is ignored."""
    oldest = time.time() - DAYS * 24 * 3600
    with contextlib.suppress(OSError):
        for name, used in _list_times(folder).items():
            if used < oldest and _PROGRAM.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # another run deleted it first
                    (folder / name).unlink()


def _list_times(folder: Path | BucketPath) -> dict[str, float]:
    if isinstance(folder, BucketPath):
        return {name: stored.modified for name, stored in bucket.list_stored(folder).items()}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
