"""One run in a folder: `OUT/.lock` is locked while its process lives, and names the host and the process.

The system releases the lock of a process that ends, however it ends. Other machines may not see the lock on every
shared file system: for them a running process renews the file's time.
"""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
from pathlib import Path

from shardformer import files
from shardformer.checkpoint.store import FolderLost, Lock
from shardformer.errors import RunError, UsageError

NAME = ".lock"
RENEW_SECONDS = 20
STALE_SECONDS = 120  # a lock of another machine that was not renewed for so long belongs to a dead run


class RunLock(Lock):
    def __init__(self, out: Path):
        self._out, self._path = Path(out), Path(out) / NAME

    def __enter__(self) -> "RunLock":
        try:
            self._made = files.make_folder(self._out)
            self._descriptor = _acquire(self._path)
            self._folder = os.open(self._out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise RunError(f"cannot write in {self._out}: {error}; give another folder as out=") from None
        self._released = threading.Event()
        self._renewing = threading.Thread(target=_renew, args=(self._descriptor, self._released), daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_) -> None:
        self._released.set()
        self._renewing.join()
        folder = self._find_folder()  # a moved folder must not stay locked
        with contextlib.suppress(OSError):
            if folder and files.is_open(folder / NAME, self._descriptor):  # not the lock of a run that came later
                (folder / NAME).unlink()
        os.close(self._descriptor)
        os.close(self._folder)
        with contextlib.suppress(OSError):
            for made in self._made if folder == self._out else ():  # only those that are still empty
                os.rmdir(made)

    def check_still_held(self) -> None:
        """Raises FolderLost where OUT is no longer the folder that was locked, or another run has locked it since."""
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
        self.check_still_held()

    def _find_folder(self) -> Path | None:
        """Where the locked folder is now: Linux knows the path of an open folder."""
        with contextlib.suppress(OSError):
            for path in (self._out, Path(os.readlink(f"/proc/self/fd/{self._folder}"))):
                if files.is_open(path, self._folder):
                    return path
        return None


def _acquire(path: Path) -> int:
    while True:
        # Never through a link: what it leads to would be emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor, path)
            if files.is_open(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(this_process()).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the run that held it ended and removed it between the two calls


def _lock(descriptor: int, path: Path) -> None:
    host, process = parse_owner(os.pread(descriptor, 1000, 0))
    known_dead = host == socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent} is in use by process {process} on {host}; stop that run, or give this one another out="
        ) from None
    except OSError:  # a file system without locks: ask for the process, or look at the file's time
        known_dead = known_dead and not is_alive(process)
    if host and not known_dead and (age := _seconds_since_renewal(descriptor, path)) < STALE_SECONDS:
        raise UsageError(
            f"{path.parent} was in use by process {process} on {host} {age:.0f} s ago; stop that run first. "
            f"If it is dead, wait {STALE_SECONDS} s or delete {path}"
        )


def _seconds_since_renewal(descriptor: int, path: Path) -> float:
    """By the clock of the file system at both ends: this machine's clock may differ."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        age = os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime
    if age < 0:  # dated in the future: counted from now on, or the lock of a dead run would not become stale
        os.utime(descriptor)
    return max(age, 0)


def this_process() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def parse_owner(content: bytes) -> tuple[str, int]:
    """(host, process) of the run that a lock names; ("", 0) where it names none."""
    try:
        owner = json.loads(content)
        return str(owner["host"]), int(owner["process"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return "", 0


def is_alive(process: int) -> bool:
    if process in (0, os.getpid()):  # containers reuse process ids: that one belonged to an earlier container
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it is another user's
    return True


def _renew(descriptor: int, released: threading.Event) -> None:
    while not released.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
