"""Which store a place belongs to."""

from pathlib import Path

from shardformer.checkpoint.bucket_store import BucketStore
from shardformer.checkpoint.disk_store import DiskStore
from shardformer.checkpoint.store import Lock, Place, Store
from shardformer.storage import location

_DISK, _BUCKET = DiskStore(), BucketStore()


def store_of(place: Place) -> Store:
    return _DISK if isinstance(place, Path) else _BUCKET


def lock_folder(out: Place | str) -> Lock:
    """The lock of a run folder, as a context manager: entering refuses a folder that another run uses."""
    out = location(out)
    return store_of(out).lock(out)
