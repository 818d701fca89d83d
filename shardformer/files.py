"""Files: atomic, synced writes, and reads that neither block nor grow without bound."""

import contextlib
import errno
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardformer.errors import RunError, UsageError

MAX_BYTES = 64 << 20  # the default limit, that of a settings file
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}(\.[^.]*)?", re.DOTALL)  # the names that `replacing` chooses


class NotAFileError(OSError):
    """A pipe or a device instead of a file; reading it might never end."""


def expand_home(path: str) -> str:
    """Expands a leading ~; raises UsageError if the home folder is unknown, instead of making a folder named ~."""
    expanded = os.path.expanduser(path)
    if expanded.partition("/")[0] == "~":
        raise UsageError(f"{path}: HOME is not set, so ~ is unknown; give an absolute path")
    return expanded


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Opens a regular file; raises NotAFileError for a pipe, which could block, or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb", buffering)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotAFileError(errno.EINVAL, "It is a pipe or a device", str(path))


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Returns the bytes of a file; raises OSError if it has more than `most`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than the {most:,} of such a file", str(path))
        return file.read(most)


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """Returns the text of a file, with all line ends as line feeds."""
    return io.StringIO(read_bytes(path, most).decode("utf-8"), newline=None).read()


def check_no_link(path: Path) -> None:
    """Raises UsageError for a link, through which files elsewhere would be created, changed or deleted."""
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written or deleted through links; remove it, or "
            "put what it names in its place"
        )


def open_unlinked(path: str, flags: int) -> int:
    """Opens a file as the `opener` of `open`; raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class GrowingFile:
    """The end of a file; bytes that a full disk rejects stay pending until the next call."""

    def __init__(self, path: Path):
        self._path, self._unwritten = path, b""

    def append(self, content: bytes) -> None:
        """Writes bytes after all pending ones; raises RunError if some stay pending."""
        self._unwritten += content
        self.flush()

    def flush(self) -> None:
        """Writes all pending bytes."""
        if not self._unwritten:
            return
        try:
            with open(self._path, "ab", buffering=0, opener=open_unlinked) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary file to write, which replaces `path` at the end of the block; not if the block raises."""
    # A random name, as containers that share a disk may share process ids, and an existing link would be followed.
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):  # a full disk: writes do not know their file
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path, least_age: float = 0) -> None:
    """Deletes what killed processes left of `replacing` in a folder.

    Where another process may be writing, `least_age` is a number of seconds that no write takes.
    """
    latest = time.time() - least_age
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and path.is_file() and (not least_age or path.stat().st_mtime < latest):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Excludes all other processes of this machine from blocks with the same path; removes the file afterwards."""
    import fcntl  # missing on some systems, and needed only here

    while True:
        with open(path, "a", opener=open_unlinked) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_open(path, file.fileno()):
                continue  # the previous holder has removed the file, and a third process may hold a new one
            try:
                yield
                return
            finally:
                path.unlink(missing_ok=True)


def make_folder(path: Path) -> list[Path]:
    """Makes a folder and its parents; returns the new ones, the innermost first."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in created:
        sync(folder.parent)
    return created


def sync(path: Path) -> None:
    """Syncs a file or a folder to the disk, if its file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def is_open(path: Path, descriptor: int) -> bool:
    """Returns True if `path` is the open file or folder: device and inode are equal."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
