"""Checkpoints in a bucket, where nothing can be renamed: a checkpoint exists if and only if its manifest does.

`step_00000040/TOKEN-parts-of-33554432/` has the files; `step_00000040/manifest.json` is put last and never replaced.
A large file is split into objects `NAME.00000`, `NAME.00001`, ... of 32 MiB, each uploaded by one request. A killed
process leaves complete objects, which the next save deletes. It leaves no multipart upload, which would be invisible in
listings and cost money.
"""

import contextlib
import errno
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from shardformer.checkpoint import lease, store
from shardformer.checkpoint.lease import Lease
from shardformer.checkpoint.store import MANIFEST, FolderLost, Lock, LockTimes, Store
from shardformer.storage import BucketPath, bucket

_STEP = re.compile(r"(step_\d{8,18})/(.+)")
_SET_ASIDE = "manifest.damaged{}.json"


class BucketStore(Store[BucketPath]):
    """Checkpoints in a bucket.

    Arguments:
      part: bytes of the objects that large files are split into.
      uploads: parts that are sent at the same time; a process has at most one part more in memory.
      read_threads: requests of a restore at the same time.
    """

    poll_seconds = 0.5

    def __init__(self, part: int = 32 * 2**20, uploads: int = 4, read_threads: int = 16):
        self._part, self._uploads, self.read_threads = part, uploads, read_threads

    def read(self, path: BucketPath, max_bytes: int) -> bytes:
        return bucket.read(path, max_bytes)[0]

    def sizes(self, folder: BucketPath, names: Iterable[str]) -> dict[str, int]:
        objects = bucket.list_objects(folder)
        if store.part_bytes(folder):
            return store.add_up(names, objects)
        return {name: objects[name] for name in names if name in objects}

    def read_into(self, path: BucketPath, offset: int, target: np.ndarray) -> int:
        done = 0
        for part, start, length in store.locate(path, offset, target.size):
            content = bucket.read_range(part, start, length)
            target[done : done + len(content)] = np.frombuffer(content, np.uint8)
            done += len(content)
        return done

    def write_at_once(self, path: BucketPath, content: bytes) -> None:
        bucket.write(path, content)

    @contextlib.contextmanager
    def create(self, path: BucketPath) -> Iterator["PartWriter"]:
        with ThreadPoolExecutor(self._uploads) as threads:
            writer = PartWriter(path, threads, self._part, self._uploads)
            yield writer
            writer.finish()

    def sync(self, path: BucketPath) -> None:
        """Does nothing: an object is stored durably when its upload ends."""

    def list_complete(self, out: BucketPath) -> list[str]:
        """Leaves out a manifest without files: its put arrived after its save had failed and removed them."""
        return [name for name, objects in _list_step_folders(out).items() if MANIFEST in objects and len(objects) > 1]

    def temporary_folder(self, target: BucketPath, token: str) -> BucketPath:
        return target / self.subfolder(token)

    def subfolder(self, token: str) -> str:
        return store.folder_name(token, self._part)

    def make_run_folder(self, out: BucketPath) -> None:
        """Does nothing: a bucket has no folders."""

    def make_temporary_folder(self, folder: BucketPath) -> None:
        pass

    def publish(self, temporary: BucketPath, target: BucketPath, content: bytes, lock: Lock | None) -> None:
        if lock:
            lock.renew()
        try:
            bucket.create(target / MANIFEST, content)
        except bucket.ChangedError:
            raise FileExistsError(errno.EEXIST, "The checkpoint exists already", str(target)) from None
        try:
            if lock:
                lock.renew()
        except FolderLost:  # this process was frozen between the two calls, and another run has started here
            bucket.delete([target / MANIFEST])
            raise

    def remove(self, target: BucketPath) -> None:
        bucket.delete([target / MANIFEST])
        self._remove_leftovers(target, list(bucket.list_objects(target)))

    def set_aside(self, target: BucketPath) -> BucketPath:
        """Renames the manifest; `_remove_leftovers` deletes nothing next to a manifest that was renamed."""
        content = bucket.read(target / MANIFEST)[0]
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            path = target / _SET_ASIDE.format(suffix)
            with contextlib.suppress(bucket.ChangedError):
                bucket.create(path, content)
                bucket.delete([target / MANIFEST])
                return path
        raise FileExistsError(errno.EEXIST, "Too many damaged checkpoints", str(target))

    def remove_temporary(self, out: BucketPath, but_not: BucketPath | None = None) -> None:
        with contextlib.suppress(OSError):
            for folder, objects in _list_step_folders(out).items():
                rest = [name for name in objects if but_not is None or (out / folder / name).parent != but_not]
                self._remove_leftovers(out / folder, rest)

    def _remove_leftovers(self, target: BucketPath, objects: list[str]) -> None:
        """Deletes the objects of a step folder that belong to no published and to no damaged checkpoint."""
        if objects == [MANIFEST]:  # see `list_complete`
            bucket.delete([target / MANIFEST])
        manifests = [name for name in objects if name.startswith("manifest.")]
        subfolders = {name.partition("/")[0] for name in objects} - set(manifests)
        if manifests == [MANIFEST] and len(subfolders) > 1:  # another run lost the race for this step
            with contextlib.suppress(ValueError, KeyError):  # without a subfolder it is the copy of one on a disk
                published = json.loads(bucket.read(target / MANIFEST)[0])["subfolder"]
                bucket.delete(target / name for name in objects if name.partition("/")[0] in subfolders - {published})
        elif not manifests:
            bucket.delete(target / name for name in objects)

    def lock(self, out: BucketPath, times: LockTimes | None = None) -> Lock:
        return Lease(out, times=times or lease.TIMES)


class PartWriter(io.RawIOBase):
    """A file that splits its content into parts and uploads at most `uploads` of them at the same time."""

    def __init__(self, path: BucketPath, threads: ThreadPoolExecutor, part: int, uploads: int):
        self._most = uploads
        self._path, self._threads = path, threads
        self._part, self._filled, self._number = np.empty(store.part_bytes(path.parent) or part, np.uint8), 0, 0
        self._uploads: deque[Future[bucket.Version]] = deque()

    def tell(self) -> int:
        return self._number * self._part.size + self._filled

    def write(self, data) -> int:
        data = np.frombuffer(data, np.uint8)
        done = 0
        while done < data.size:
            count = min(self._part.size - self._filled, data.size - done)
            self._part[self._filled : self._filled + count] = data[done : done + count]
            done, self._filled = done + count, self._filled + count
            if self._filled == self._part.size:
                self._upload()
        return done

    def finish(self) -> None:
        if self._filled or not self._number:  # an empty file is an object too
            self._upload()
        while self._uploads:
            self._uploads.popleft().result()

    def _upload(self) -> None:
        if len(self._uploads) == self._most:
            self._uploads.popleft().result()
        content = self._part[: self._filled].data
        self._uploads.append(self._threads.submit(bucket.write, store.part(self._path, self._number), content))
        self._part, self._filled, self._number = np.empty_like(self._part), 0, self._number + 1


def _list_step_folders(out: BucketPath) -> dict[str, list[str]]:
    """Returns the names of the objects below each step folder."""
    folders: dict[str, list[str]] = {}
    for name in bucket.list_objects(out):
        if match := _STEP.fullmatch(name):
            folders.setdefault(match[1], []).append(match[2])
    return folders
