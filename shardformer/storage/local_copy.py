"""Copies of objects on this machine's disk, for random access and for code that reads only files.

A visible copy is complete and checked, and contains one version of each object. The processes of a machine share it.
The records of a run in a bucket (settings, metrics, curves, events) are written locally and uploaded at each save.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import RunError, UsageError
from shardformer.files import locked, make_folder, replacing, sync
from shardformer.messages import log
from shardformer.storage import bucket
from shardformer.storage.bucket import ChangedError, Stored
from shardformer.storage.bucket_path import BucketPath, cache_folder, local_folder

FOLDER = "copies"  # in the cache


class Requests(NamedTuple):
    """The sizes of reads of objects."""

    range: int = 32 * 2**20  # bytes of one request
    threads: int = 8  # requests at the same time, each with a range in memory


REQUESTS = Requests()
Check = Callable[[Path], object]  # raises if a file or a folder is damaged
_open_folders: dict[str, int] = {}  # open folders of the copies that this process uses


def copy_to_disk(path: BucketPath, check: Check | None = None) -> Path:
    """Copies an object as a file, or all objects below a path as a folder."""
    try:
        head = bucket.head(path)
        objects = {path: head} if head else {path / name: it for name, it in bucket.list_stored(path).items()}
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if not objects:
        raise UsageError(f"{path} does not exist")
    return _copy(str(path), objects, check and (lambda folder: check(folder / _name(path)))) / _name(path)


def copy_files(what: str, places: list[BucketPath]) -> list[Path]:
    """Copies objects as one copy; returns their files."""
    with ThreadPoolExecutor(REQUESTS.threads) as pool:
        try:
            objects = dict(zip(places, pool.map(bucket.head, places), strict=True))
        except OSError as error:
            raise RunError(f"cannot read {error.filename}: {error.strerror}") from None
    if missing := next((path for path, stored in objects.items() if not stored), None):
        raise UsageError(f"{missing} does not exist")
    folder = _copy(what, {path: stored for path, stored in objects.items() if stored}, None)
    return [folder / _name(path) for path in places]


def _copy(what: str, objects: dict[BucketPath, Stored], check: Check | None) -> Path:
    """Returns the folder of the copies; continues an interrupted copy with its missing files."""
    objects = {path: stored for path, stored in objects.items() if path.name}  # a folder may be an object, too
    copies, prefix = cache_folder() / FOLDER, _digest(what)
    final = copies / f"{prefix}-{_digest([(str(path), stored) for path, stored in sorted(objects.items())])}"
    if final.exists():
        return _hold(prefix, final)
    hidden = final.with_name(f".{final.name}")
    try:
        make_folder(copies)
        with locked(copies / f".{prefix}.lock"):
            if final.exists():  # another process has copied it while this one waited
                return _hold(prefix, final)
            _download(what, objects, hidden, final)
            if check:
                _check(check, hidden)
            os.rename(hidden, final)
            sync(copies)
            _hold(prefix, final)
            for older in (*copies.glob(f"{prefix}-*"), *copies.glob(f".{prefix}-*/")):
                if older != final and not _is_held(older):
                    shutil.rmtree(older, ignore_errors=True)
    except ChangedError as error:
        raise RunError(f"{error.filename} has changed while it was copied; start again") from None
    except OSError as error:
        raise RunError(f"cannot copy {what} to {copies}: {error.strerror or error}; start again to go on") from None
    return final


def _hold(prefix: str, folder: Path) -> Path:
    """Returns the folder, and keeps other processes from removing it while this process lives."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    before = _open_folders.pop(prefix, None)
    _open_folders[prefix] = descriptor
    if before is not None:
        os.close(before)
    return folder


def _is_held(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)


def _check(check: Check, hidden: Path) -> None:
    try:
        check(hidden)
    except (RunError, UsageError):
        shutil.rmtree(hidden)  # else the next start would continue it
        raise


def _download(what: str, objects: dict[BucketPath, Stored], hidden: Path, final: Path) -> None:
    left = {path: it for path, it in objects.items() if not (hidden / _name(path)).exists()}
    total = sum(stored.bytes for stored in left.values())
    free = shutil.disk_usage(final.parent).free
    if total > free:
        raise UsageError(
            f"{what} has {total / 1e9:,.1f} GB to copy, and the disk of {final.parent} has room for {free / 1e9:,.1f} "
            "GB; name a folder on a larger one: SHARDFORMER_CACHE=FOLDER"
        )
    log.info(f"copying {what} ({total / 1e6:,.1f} MB) to {final}, where the next start finds it")
    with ThreadPoolExecutor(REQUESTS.threads) as pool:
        files = [_File(path, stored, hidden / _name(path)) for path, stored in left.items()]
        tasks = [pool.submit(file.copy_range, start) for file in files for start in file.starts]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _File:
    """The copy of one object, which is renamed to its final name after its last range."""

    def __init__(self, place: BucketPath, stored: Stored, path: Path):
        self._place, self._stored, self._path = place, stored, path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self.starts = range(0, max(stored.bytes, 1), REQUESTS.range)
        self._left, self._counting = len(self.starts), threading.Lock()
        make_folder(path.parent)
        self._temporary.touch()

    def copy_range(self, start: int) -> None:
        length = min(REQUESTS.range, self._stored.bytes - start)
        with open(self._temporary, "r+b") as file:
            if length:
                content = bucket.read_range_of_version(self._place, start, length, self._stored.version)
                if len(content) != length:
                    raise OSError(f"{self._place} gave {len(content)} bytes of {length}")
                file.seek(start)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with self._counting:
            self._left -= 1
            is_last = not self._left
        if is_last:
            os.rename(self._temporary, self._path)
            sync(self._path.parent)


def _name(path: BucketPath) -> str:
    """Returns the name of an object's copy, relative to the folder of the copies."""
    name = f"{path.bucket}/{path.key}"
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise UsageError(f"{path} cannot be the name of a file on a disk; give the object another name")
    return name


def _digest(content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


_uploaded: dict[BucketPath, tuple[int, int]] = {}  # size and time of the records that this process has uploaded


def upload_changed(path: BucketPath) -> None:
    """Uploads the records that changed since the last upload."""
    folder = local_folder(path)
    for name in _list_local(folder):
        stat = (folder / name).stat()
        state = (stat.st_size, stat.st_mtime_ns)
        if _uploaded.get(path / name) != state:
            (path / name).write_bytes((folder / name).read_bytes())
            _uploaded[path / name] = state


def download(path: BucketPath, folder: Path) -> None:
    """Makes the records in a local folder equal to those in the bucket; deletes all other files."""
    result = [name for name in bucket.list_objects(path) if _is_record(name)]
    for name in result:
        make_folder((folder / name).parent)
        with replacing(folder / name) as temporary:
            temporary.write_bytes((path / name).read_bytes())
    for name in set(_list_local(folder)) - set(result):
        (folder / name).unlink(missing_ok=True)


def _list_local(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if _is_record(name)]


def _is_record(name: str) -> bool:
    """Excludes checkpoints, the lock, temporary files and names with `..`."""
    return not name.startswith("step_") and all(part and not part.startswith(".") for part in name.split("/"))
