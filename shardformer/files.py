"""Files: written whole or not there, and on the disk; read without waiting and without end."""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 64 << 20  # of a settings file


class NotAFileError(OSError):
    """A pipe or a device in a file's place: reading it may never end."""


def open_regular(path: Path, **how) -> BinaryIO:
    """Opens without waiting: a pipe in the file's place may never send anything."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb", **how)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotAFileError(errno.EINVAL, "It is a pipe or a device", str(path))


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """All of a file that has at most so many bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than the {most:,} of such a file", str(path))
        return file.read(most)


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The same as text, with the line ends of any system as line feeds."""
    return io.StringIO(read_bytes(path, most).decode("utf-8"), newline=None).read()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` at the end of the block, whole, or not at all."""
    # Not by the process id: containers that share a disk may have the same, and a link there would be followed.
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While no other process of this machine is in such a block; the file is there only meanwhile."""
    import fcntl  # not on every system; nothing else needs it

    while True:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_open(path, file.fileno()):
                continue  # the process that held it has removed it, and a third one may hold another
            try:
                yield
                return
            finally:
                path.unlink(missing_ok=True)


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


def is_open(path: Path, descriptor: int) -> bool:
    """Whether a path leads to the very file or folder that is open: device and inode are equal."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
