"""Chooses the store of a path."""

from pathlib import Path
from typing import Any

from shardformer.checkpoint.disk_store import DiskStore
from shardformer.checkpoint.store import Location, Lock, LockTimes, Store
from shardformer.storage import location

_DISK = DiskStore()
_BUCKET: Store[Any] | None = None  # created at the first path in a bucket


def store_of(path: Location) -> Store[Any]:  # no static type ties the store to its type of path
    global _BUCKET
    if isinstance(path, Path):
        return _DISK
    if _BUCKET is None:
        from shardformer.checkpoint.bucket_store import BucketStore  # not imported for a run on a disk

        _BUCKET = BucketStore()
    return _BUCKET


def lock_folder(out: Location | str, times: LockTimes | None = None) -> Lock:
    """Returns the lock of a run folder, a context manager; entering raises UsageError if another run has it."""
    out = location(out)
    return store_of(out).lock(out, times)
