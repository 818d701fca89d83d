"""Chooses the store of a path, and reads its files: missing, truncated or too long ones are damage.

Errors of the system are not.
"""

from pathlib import Path
from typing import Any

import numpy as np

from shardformer.checkpoint.disk_store import DiskStore
from shardformer.checkpoint.store import Damaged, Location, Lock, LockTimes, Store
from shardformer.errors import RunError
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


def read_small_file(path: Location, max_bytes: int) -> bytes:
    try:
        content = store_of(path).read(path, max_bytes)
    except FileNotFoundError:
        raise Damaged(
            f"{path.parent} has no {path.name}: it is not a checkpoint of this version, or it is incomplete"
        ) from None
    except NotADirectoryError:
        raise Damaged(f"{path} cannot be read: {path.parent} is not a folder") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise Damaged(f"{path} is damaged: it has more than the {max_bytes} bytes that such a file can have")
    return content


def check_sizes(folder: Location, expected: dict[str, int]) -> None:
    try:
        sizes = store_of(folder).sizes(folder, expected)
    except OSError as error:
        raise RunError(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    for name, nbytes in expected.items():
        if name not in sizes:
            raise Damaged(f"{folder} has no {name}: the checkpoint is incomplete")
        if sizes[name] < nbytes:
            raise Damaged(f"{folder / name} is truncated: it has {sizes[name]} bytes, expected {nbytes}")
        if sizes[name] > nbytes:
            raise Damaged(f"{folder / name} has {sizes[name] - nbytes} bytes after its last leaf, expected none")


def read_into(path: Location, offset: int, target: np.ndarray) -> None:
    done = store_of(path).read_into(path, offset, target)
    if done < target.size:
        raise Damaged(f"{path} is truncated: {target.size - done} bytes at {offset + done} are missing")
