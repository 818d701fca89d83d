"""Files that are whole or not there, and on the disk: neither a kill nor a power cut leaves half of one."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` at the end of the block, whole, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> list[Path]:
    """With the folders above it; returns those that were not there, the innermost first."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync(folder.parent)
    return made


def sync(path: Path) -> None:
    """A file or a folder to the disk, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)
