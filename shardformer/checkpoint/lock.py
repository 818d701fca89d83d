"""The lock of a run folder on a disk: `OUT/.lock` is locked while its process lives; it names the host and the process.

The system releases the lock when the process ends, however it ends. Some shared file systems hide the lock from other
machines. For them a running process renews the file's modification time.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from shardformer import files
from shardformer.checkpoint.lock_owner import Owner, is_known_dead, parse_owner, this_process
from shardformer.checkpoint.store import FolderLost, FolderTaken, Lock, LockTimes
from shardformer.errors import RunError
from shardformer.messages import log

NAME = ".lock"
TIMES = LockTimes(renew=20, expire=120, watch=1.0)  # of a run on another machine; this one's locks are seen


class RunLock(Lock):
    """The lock of a run folder on a disk."""

    def __init__(self, out: Path, times: LockTimes = TIMES):
        self._out, self._path, self._times = Path(out), Path(out) / NAME, times

    def __enter__(self) -> "RunLock":
        try:
            self._created = files.make_folder(self._out)
            self._descriptor = _acquire(self._path, self._times)
            self._folder = os.open(self._out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise RunError(f"cannot write in {self._out}: {error}; give another folder as out=") from None
        self._released = threading.Event()
        args = (self._descriptor, self._released, self._times.renew)
        self._renewing = threading.Thread(target=_renew, args=args, daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_) -> None:
        self._released.set()
        self._renewing.join()
        folder = self._find_folder()  # a moved folder must not stay locked
        with contextlib.suppress(OSError):
            if folder and files.is_open(folder / NAME, self._descriptor):  # else it is the lock of a later run
                (folder / NAME).unlink()
        os.close(self._descriptor)
        os.close(self._folder)
        with contextlib.suppress(OSError):
            for created in self._created if folder == self._out else ():
                os.rmdir(created)  # fails unless it is still empty

    def check_still_locked(self) -> None:
        """Raises FolderLost if OUT is another folder than the one that was locked, or if another run has locked it."""
        if not files.is_open(self._out, self._folder):
            moved_to = self._find_folder()
            raise FolderLost(
                f"{self._out} was moved to {moved_to} while this run was training"
                if moved_to
                else f"{self._out} was deleted, or moved to another disk, while this run was training",
                moved_to,
            )
        if self._path.exists() and not files.is_open(self._path, self._descriptor):
            raise FolderLost(f"another run has locked {self._out} since {self._path} was deleted")

    def renew(self) -> None:
        self.check_still_locked()

    def _find_folder(self) -> Path | None:
        """Returns the present path of the locked folder: Linux knows the path of an open folder."""
        with contextlib.suppress(OSError):
            for path in (self._out, Path(os.readlink(f"/proc/self/fd/{self._folder}"))):
                if files.is_open(path, self._folder):
                    return path
        return None


def _acquire(path: Path, times: LockTimes) -> int:
    while True:
        # O_NOFOLLOW: a link's target would be truncated.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor, path, times)
            if files.is_open(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(this_process()._asdict()).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the run with the lock removed the file between the two calls


def _lock(descriptor: int, path: Path, times: LockTimes) -> None:
    owner, here = parse_owner(os.pread(descriptor, 1000, 0)), this_process()
    is_same_host = owner.host == here.host
    known_dead = is_same_host and owner.boot in ("", here.boot)  # one kernel: its lock would be seen
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, owner) from None
    except OSError:  # a file system without locks: the process and the file's time decide
        known_dead = is_known_dead(owner)
    if not owner.host or known_dead or (age := _seconds_since_renewal(descriptor, path)) >= times.expire:
        return
    if is_same_host and owner[2:4] != here[2:4]:  # before a restart, or in another container or machine of this name
        _wait_until_stale(descriptor, path, owner, times)
        return
    raise FolderTaken(
        f"{path.parent} was in use by {owner} {age:.0f} s ago; stop that run first. "
        f"If it is dead, wait {times.expire} s or delete {path}"
    )


def _in_use(path: Path, owner: Owner) -> FolderTaken:
    return FolderTaken(f"{path.parent} is in use by {owner}; stop that run, or give this one another out=")


def _wait_until_stale(descriptor: int, path: Path, owner: Owner, times: LockTimes) -> None:
    """Waits until the lock is stale; raises FolderTaken if its run renews it meanwhile."""
    log.info(
        f"{path.parent} was last used by {owner}, before a restart or on another machine of this name: "
        f"waiting up to {times.expire} s to see whether that run is still alive"
    )
    renewed = os.fstat(descriptor).st_mtime_ns
    while _seconds_since_renewal(descriptor, path) < times.expire:
        time.sleep(times.watch)
        if os.fstat(descriptor).st_mtime_ns != renewed:
            raise _in_use(path, owner)


def _seconds_since_renewal(descriptor: int, path: Path) -> float:
    """Compares two times of the file system's clock: this machine's clock may differ."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        age = os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime
    if age < 0:  # a time in the future would keep a dead run's lock from becoming stale
        os.utime(descriptor)
    return max(age, 0)


def _renew(descriptor: int, released: threading.Event, seconds: float) -> None:
    while not released.wait(seconds):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
