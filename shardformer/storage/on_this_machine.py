"""The files of a path on this machine: the path itself on a disk, or the local copy of a path in a bucket."""

from collections.abc import Callable
from pathlib import Path

from shardformer.files import expand_home
from shardformer.storage.bucket_path import BucketPath, location, reading_folder


def local_path(text, check: Callable[[Path], object] | None = None) -> Path:
    """Returns a path on a disk unchanged; copies a file or a folder in a bucket to the disk."""
    path = location(text)
    if isinstance(path, Path):
        return Path(expand_home(str(path)))
    from shardformer.storage.local_copy import copy_to_disk  # not imported for a path on a disk

    return copy_to_disk(path, check)


def read_records(path: Path | BucketPath) -> Path:
    """Returns a folder with a run's records: the run folder on a disk, or a fresh copy of a bucket's."""
    folder = reading_folder(path)
    download_records(path, folder)
    return folder


def download_records(path: Path | BucketPath, folder: Path) -> None:
    """Makes the records in a local folder equal to those in the bucket; does nothing for a run on a disk."""
    if isinstance(path, BucketPath):
        from shardformer.storage import local_copy  # not imported for a run on a disk

        local_copy.download(path, folder)


def upload_records(path: Path | BucketPath) -> None:
    """Uploads the records that changed since the last upload; does nothing for a run on a disk."""
    if isinstance(path, BucketPath):
        from shardformer.storage import local_copy  # not imported for a run on a disk

        local_copy.upload_changed(path)
