"""What a checkpoint needs of the place where it is kept. There are two: disk_store.py and bucket_store.py.

A checkpoint is written into a temporary folder by all processes and published by one; until then nothing sees it.
Failures of a store are OSErrors.
"""

import abc
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardformer.errors import RunError
from shardformer.storage import BucketPath

Place = Path | BucketPath

MANIFEST = "manifest.json"


class Damaged(RunError):
    """This checkpoint cannot be trusted; an older one may be intact."""


class FolderLost(RunError):
    """The run folder was moved, deleted or taken over. `moved_to` is where it is now, if that can be known."""

    def __init__(self, message: str, moved_to: Path | None = None):
        super().__init__(message)
        self.moved_to = moved_to


class Lock(abc.ABC):
    """One run in a folder: entering refuses a folder that another run uses, leaving releases it."""

    @abc.abstractmethod
    def __enter__(self) -> "Lock": ...

    @abc.abstractmethod
    def __exit__(self, *_) -> None: ...

    @abc.abstractmethod
    def check_still_held(self) -> None:
        """Raises FolderLost where the folder is no longer this run's. Cheap: it may be called at every step."""

    @abc.abstractmethod
    def renew(self) -> None:
        """The same by asking the store itself: called before and after a checkpoint is published."""


class Store(abc.ABC):
    poll_seconds: float  # between two looks at what other processes have written
    read_threads: int

    # Files

    @abc.abstractmethod
    def read(self, path: Place, max_bytes: int) -> bytes:
        """A small file; one byte more than `max_bytes` where it has more."""

    @abc.abstractmethod
    def sizes(self, folder: Place, names: Iterable[str]) -> dict[str, int]:
        """The bytes of those of the files that exist."""

    @abc.abstractmethod
    def read_into(self, path: Place, offset: int, target: np.ndarray) -> int:
        """Fills an array of bytes; returns how many there were."""

    @abc.abstractmethod
    def write_at_once(self, path: Place, content: bytes) -> None:
        """A small file, complete as soon as it is visible."""

    @abc.abstractmethod
    def create(self, path: Place) -> contextlib.AbstractContextManager[BinaryIO]:
        """A large file, to be written in order."""

    @abc.abstractmethod
    def sync(self, path: Place) -> None:
        """Waits until such a file is stored safely; `publish` does so for the files of its own process."""

    # Checkpoints in a run folder

    @abc.abstractmethod
    def list_complete(self, out: Place) -> list[str]:
        """The names of the folders in `out` that hold a published checkpoint, and perhaps of others."""

    @abc.abstractmethod
    def temporary_folder(self, target: Place, token: str) -> Place:
        """Where the processes write a checkpoint before it is published as `target`."""

    @abc.abstractmethod
    def subfolder(self, token: str) -> str:
        """The folder of a published checkpoint that holds its files; "" for the checkpoint's own."""

    @abc.abstractmethod
    def make_run_folder(self, out: Place) -> None: ...

    @abc.abstractmethod
    def make_temporary_folder(self, folder: Place) -> None:
        """In a run folder that exists; other processes may have made it already."""

    @abc.abstractmethod
    def publish(self, temporary: Place, target: Place, manifest: bytes, lock: Lock | None) -> None:
        """Makes a checkpoint visible at once and for good, or raises; never replaces one."""

    @abc.abstractmethod
    def remove(self, target: Place) -> None:
        """Deletes a checkpoint; it is invisible before anything of it is missing."""

    @abc.abstractmethod
    def set_aside(self, target: Place) -> Place:
        """Hides a damaged checkpoint and keeps its files; returns where it is now."""

    @abc.abstractmethod
    def remove_temporary(self, out: Place, but_not: Place | None = None) -> None:
        """Removes what killed processes and failed saves left, as far as that is possible."""

    @abc.abstractmethod
    def lock(self, out: Place) -> Lock: ...
