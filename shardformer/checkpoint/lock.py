"""One run in a folder: `OUT/.lock` is locked while its process lives, and says which process that is.

The system lets go of the lock of a process that ends, however it ends. Other machines may not see it on every shared
file system: for them the file's time is renewed while the run lives.
"""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from shardformer import files
from shardformer.errors import RunError, UsageError

NAME = ".lock"
RENEWED = 20  # seconds between the signs of life
STALE = 120  # seconds without one after which another machine's run is taken for dead


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Refuses a folder in which another run lives."""
    path, out = Path(out) / NAME, Path(out)
    try:
        made = files.make_folder(out)
        descriptor = _acquire(path)
    except OSError as error:
        raise RunError(f"cannot write in {out}: {error}; give another folder as out=") from None
    over = threading.Event()
    alive = threading.Thread(target=_renew, args=(descriptor, over), daemon=True)
    alive.start()
    try:
        yield
    finally:
        over.set()
        alive.join()
        with contextlib.suppress(OSError):
            if _is_at(path, descriptor):  # not another run's, which came when somebody had removed ours
                path.unlink()
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for folder in made:  # where nothing came of it
                os.rmdir(folder)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            if _is_at(path, descriptor):
                owner = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its run ended, and removed it, between the two calls


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, path: Path) -> None:
    host, process = _owner(descriptor)
    known_dead = host == socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent} is in use by process {process} on {host}; stop that run, or give this one another out="
        ) from None
    except OSError:  # a file system without locks: the process or its signs of life have to do
        known_dead = known_dead and not _is_alive(process)
    if host and not known_dead and (age := _age(descriptor, path)) < STALE:
        raise UsageError(
            f"{path.parent} was in use by process {process} on {host} {age:.0f} s ago; stop that run first. "
            f"If it is dead, wait {STALE} s or delete {path}"
        )


def _age(descriptor: int, path: Path) -> float:
    """Seconds since the last sign of life, both ends by the clock of the file system: this machine's may be another."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return max(os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime, 0)


def _owner(descriptor: int) -> tuple[str, int]:
    """(host, process) that the file names; ("", 0) while it names none."""
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return str(owner["host"]), int(owner["process"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", 0


def _is_alive(process: int) -> bool:
    if process in (0, os.getpid()):  # in a container ids come again: that one was of an earlier life
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True


def _renew(descriptor: int, over: threading.Event) -> None:
    while not over.wait(RENEWED):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
