"""Buckets that are folders: gs://BUCKET/KEY is the file BUCKET/KEY of the working directory."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEME = "gs://"
_EXCEPTIONS = "google.cloud.exceptions"  # Google's own, where only its storage is missing


class NotFound(Exception):
    """What google.cloud raises about a missing object."""


class Blob:
    """An object of a bucket, which is a file."""

    def __init__(self, folder: Path, file: Path):
        self._folder, self._file = folder, file
        self.name = file.relative_to(folder).as_posix()

    def delete(self) -> None:
        """Deletes the file, and the folders that are empty then: a bucket has none."""
        self._file.unlink()
        folder = self._file.parent
        while folder != self._folder and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


class Client:
    """A client whose buckets are folders of the working directory."""

    def list_blobs(self, bucket: str, prefix: str = "") -> Iterator[Blob]:
        folder = _folder_of(bucket)
        files = sorted(file for file in (folder / f"{prefix}*").parent.rglob("*") if file.is_file())
        return (blob for blob in [Blob(folder, file) for file in files] if blob.name.startswith(prefix))


def opener(open_other: Callable) -> Callable:
    """Returns `smart_open.open` for such buckets; `open_other` opens their files and every other path."""

    def open(uri, mode="r", *arguments, **options) -> Any:
        if not str(uri).startswith(SCHEME):
            return open_other(uri, mode, *arguments, **options)
        bucket, _, key = uri.removeprefix(SCHEME).partition("/")
        file = _folder_of(bucket) / key
        if mode.startswith("r") and not file.exists():
            raise getattr(sys.modules.get(_EXCEPTIONS), "NotFound", NotFound)(f"{uri}: no file {file}")
        if not mode.startswith("r"):
            file.parent.mkdir(parents=True, exist_ok=True)  # a bucket has no folders
        return open_other(str(file), mode, *arguments, **options)

    return open


def _folder_of(bucket: str) -> Path:
    if not bucket or not os.path.isdir(bucket):
        raise FileNotFoundError(
            f"{SCHEME}{bucket}: {os.getcwd()} has no folder {bucket!r}, which would stand for the bucket; make it, "
            "or pip install 'smart_open[gcs]' for Google's"
        )
    return Path(bucket)
