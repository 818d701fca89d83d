"""The interface between checkpoints and their storage; disk_store.py and bucket_store.py implement it.

All processes write a checkpoint into a temporary folder, and one publishes it; until then it is invisible.
Failures of a store are OSErrors.
"""

import abc
import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shardformer.errors import RunError, UsageError
from shardformer.storage import BucketPath

Location = Path | BucketPath
LocationT = TypeVar("LocationT", Path, BucketPath)

MANIFEST = "manifest.json"


class Damaged(RunError):
    """A checkpoint whose content differs from the saved one; an older checkpoint may be intact."""


class FolderLost(RunError):
    """The run folder was moved, deleted or taken over by another run. `moved_to` is its present path, if known."""

    def __init__(self, message: str, moved_to: Path | None = None):
        super().__init__(message)
        self.moved_to = moved_to


class FolderTaken(UsageError):
    """Another run uses the run folder, or has trained in it."""


class LockTimes(NamedTuple):
    """The times of a run folder's lock, in seconds."""

    renew: float  # between two renewals
    expire: float  # without a renewal, after which another run may take the folder
    watch: float  # between two reads of another run's lock


class Lock(abc.ABC):
    """The lock of a run folder: entering raises FolderTaken if another run uses the folder, leaving releases it."""

    @abc.abstractmethod
    def __enter__(self) -> "Lock": ...

    @abc.abstractmethod
    def __exit__(self, *_) -> None: ...

    @abc.abstractmethod
    def check_still_locked(self) -> None:
        """Raises FolderLost if this run no longer has the folder's lock. Cheap enough for every step."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Asks the store itself, and raises FolderLost likewise; called before and after publishing."""


class ArrayFile(Protocol):
    """A large file that is being written."""

    def write(self, data, /) -> int: ...

    def tell(self) -> int: ...


class Store(abc.ABC, Generic[LocationT]):
    """The files and checkpoints of one kind of storage."""

    poll_seconds: float  # between two checks of the files that other processes write
    read_threads: int

    # Files

    @abc.abstractmethod
    def read(self, path: LocationT, max_bytes: int) -> bytes:
        """Returns a small file's content; of a larger one, `max_bytes` and one byte more."""

    @abc.abstractmethod
    def sizes(self, folder: LocationT, names: Iterable[str]) -> dict[str, int]:
        """Returns the bytes of each file that exists; of a file in parts, those up to the first missing part."""

    @abc.abstractmethod
    def read_into(self, path: LocationT, offset: int, target: np.ndarray) -> int:
        """Fills an array of bytes; returns the number of bytes read."""

    @abc.abstractmethod
    def write_at_once(self, path: LocationT, content: bytes) -> None:
        """Writes a small file, which is complete as soon as it is visible."""

    @abc.abstractmethod
    def create(self, path: LocationT) -> contextlib.AbstractContextManager[ArrayFile]:
        """Creates a large file, to be written in order."""

    @abc.abstractmethod
    def sync(self, path: LocationT) -> None:
        """Waits until a large file is stored durably; `publish` does so for the files of the first process."""

    # Checkpoints in a run folder

    @abc.abstractmethod
    def list_complete(self, out: LocationT) -> list[str]:
        """Returns the names of the folders in `out` that hold a published checkpoint, and perhaps other names."""

    @abc.abstractmethod
    def temporary_folder(self, target: LocationT, token: str) -> LocationT:
        """Returns the folder in which the processes write a checkpoint before it is published as `target`."""

    @abc.abstractmethod
    def subfolder(self, token: str) -> str:
        """Returns the subfolder of a published checkpoint with its files; "" if it has none."""

    @abc.abstractmethod
    def make_run_folder(self, out: LocationT) -> None: ...

    @abc.abstractmethod
    def make_temporary_folder(self, folder: LocationT) -> None:
        """Makes the folder, in a run folder that exists; other processes may have created it already."""

    @abc.abstractmethod
    def publish(self, temporary: LocationT, target: LocationT, manifest: bytes, lock: Lock | None) -> None:
        """Makes a checkpoint visible atomically, or raises; never replaces one."""

    @abc.abstractmethod
    def remove(self, target: LocationT) -> None:
        """Hides a checkpoint, then deletes its files."""

    @abc.abstractmethod
    def set_aside(self, target: LocationT) -> LocationT:
        """Hides a damaged checkpoint and keeps its files; returns its new path."""

    @abc.abstractmethod
    def remove_temporary(self, out: LocationT, but_not: LocationT | None = None) -> None:
        """Removes the files that killed processes and failed saves left; ignores failures."""

    @abc.abstractmethod
    def lock(self, out: LocationT, times: LockTimes | None = None) -> Lock:
        """Returns the lock of a run folder; `times` replaces those of this store."""


# In a bucket, a large file is two or more objects of equal size, and a copy of it on a disk is as many files. The name
# of their folder states the size of the parts, so that a run can be copied between a disk and a bucket as it is.
_FOLDER = re.compile(r"[0-9a-f]+-parts-of-([1-9]\d{0,17})")


def folder_name(token: str, part_bytes: int) -> str:
    return f"{token}-parts-of-{part_bytes}"


def part_bytes(folder: LocationT) -> int | None:
    """Returns the size of the parts of the files in a folder; None if its files are not split."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def part(path: LocationT, number: int) -> LocationT:
    """Returns the path of one part of a file."""
    return path.parent / part_name(path.name, number)


def locate(path: LocationT, offset: int, length: int) -> Iterator[tuple[LocationT, int, int]]:
    """Yields the (path, offset, length) of the reads that give a range of a file, split or not."""
    size = part_bytes(path.parent)
    if size is None:
        yield path, offset, length
        return
    end = offset + length
    while offset < end:
        number, start = divmod(offset, size)
        count = min(size - start, end - offset)
        yield part(path, number), start, count
        offset += count


def add_up(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each file by those of its parts, up to the first missing part."""
    total = {}
    for name in names:
        parts = itertools.takewhile(sizes.__contains__, (part_name(name, number) for number in itertools.count()))
        if result := [sizes[part] for part in parts]:
            total[name] = sum(result)
    return total


def part_name(name: str, number: int) -> str:
    return f"{name}.{number:05d}"
