"""Checkpoints on a disk: a temporary folder gets the checkpoint's name once its files are on the disk.

`.step_00000040.tmp-TOKEN` is being written or deleted; `step_00000040.damaged` was set aside.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardformer import files
from shardformer.checkpoint import lock, store
from shardformer.checkpoint.lock import RunLock
from shardformer.checkpoint.store import MANIFEST, Damaged, Lock, LockTimes, Store

_TEMPORARY = re.compile(r"\.step_\d{8,18}\.tmp-\w+")


class DiskStore(Store[Path]):
    """Checkpoints on a disk."""

    poll_seconds = 0.02
    read_threads = min(8, os.cpu_count() or 1)  # reads and checksums release the interpreter's lock

    def read(self, path: Path, max_bytes: int) -> bytes:
        with _open_regular(path) as file:
            # `read` allocates as many bytes as it is asked for.
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)

    def sizes(self, folder: Path, names: Iterable[str]) -> dict[str, int]:
        if store.part_bytes(folder):
            listed = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            return store.add_up(names, _sizes_of_files(folder, listed))
        return _sizes_of_files(folder, names)

    def read_into(self, path: Path, offset: int, target: np.ndarray) -> int:
        done = 0
        for part, start, length in store.locate(path, offset, target.size):
            done += _read_file_into(part, start, target[done : done + length])
        return done

    def write_at_once(self, path: Path, content: bytes) -> None:
        with files.replacing(path) as temporary:
            temporary.write_bytes(content)

    def create(self, path: Path) -> BinaryIO:
        return open(path, "wb")

    def sync(self, path: Path) -> None:
        files.sync(path)

    def list_complete(self, out: Path) -> list[str]:
        return [path.name for path in out.iterdir() if path.is_dir()] if out.is_dir() else []

    def temporary_folder(self, target: Path, token: str) -> Path:
        return target.with_name(f".{target.name}.tmp-{token}")

    def subfolder(self, token: str) -> str:
        return ""

    def make_run_folder(self, out: Path) -> None:
        files.make_folder(out)

    def make_temporary_folder(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    def publish(self, temporary: Path, target: Path, content: bytes, lock: Lock | None) -> None:
        (temporary / MANIFEST).write_bytes(content)
        for path in temporary.iterdir():
            files.sync(path)
        files.sync(temporary)
        if lock:
            lock.renew()
        if os.path.lexists(target) and not target.is_dir():  # a stray file or a dangling link
            self.set_aside(target)
        os.rename(temporary, target)
        try:
            files.sync(target.parent)
        except OSError:
            os.rename(target, temporary)
            raise

    def remove(self, target: Path) -> None:
        hidden = self.temporary_folder(target, "deleted")
        os.rename(target, hidden)
        _delete(hidden)

    def set_aside(self, target: Path) -> Path:
        names = (f"{target.name}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        path = next(target.with_name(name) for name in names if not os.path.lexists(target.with_name(name)))
        os.rename(target, path)
        return path

    def remove_temporary(self, out: Path, but_not: Path | None = None) -> None:
        with contextlib.suppress(OSError):
            for path in [path for path in out.iterdir() if _TEMPORARY.fullmatch(path.name) and path != but_not]:
                with contextlib.suppress(OSError):
                    _delete(path)

    def lock(self, out: Path, times: LockTimes | None = None) -> Lock:
        return RunLock(out, times or lock.TIMES)


def _sizes_of_files(folder: Path, names: Iterable[str]) -> dict[str, int]:
    result = {}
    for name in names:
        try:
            with _open_regular(folder / name) as file:
                result[name] = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / name)) from None
    return result


def _read_file_into(path: Path, offset: int, target: np.ndarray) -> int:
    """Opens the file for this read only, so that few files are open at any time."""
    view = target.data
    with _open_regular(path) as file:
        while view and (count := os.preadv(file.fileno(), [view], offset)):  # a read may be short
            view, offset = view[count:], offset + count
    return target.size - len(view)


def _open_regular(path: Path) -> BinaryIO:
    try:
        return files.open_regular(path, buffering=0)
    except files.NotAFileError:
        raise Damaged(f"{path} is not a file") from None


def _delete(path: Path) -> None:
    """Deletes a file, a link (not its target) or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
