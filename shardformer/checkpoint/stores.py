"""Chooses the store of a path."""

from pathlib import Path
from typing import Any

from shardformer.checkpoint.bucket_store import BucketStore
from shardformer.checkpoint.disk_store import DiskStore
from shardformer.checkpoint.store import Location, Lock, LockTimes, Store
from shardformer.storage import location

_DISK, _BUCKET = DiskStore(), BucketStore()


def store_of(path: Location) -> Store[Any]:  # no static type ties the store to its type of path
    return _DISK if isinstance(path, Path) else _BUCKET


def lock_folder(out: Location | str, times: LockTimes | None = None) -> Lock:
    """Returns the lock of a run folder, a context manager; entering raises UsageError if another run has it."""
    out = location(out)
    return store_of(out).lock(out, times)
