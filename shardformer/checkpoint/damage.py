"""Reading a checkpoint's files: what is missing, too short or too long is damage; what the disk refuses is not."""

import os
import stat
from pathlib import Path

import numpy as np

from shardformer.errors import RunError


class Damaged(RunError):
    """This checkpoint cannot be trusted; an older one may be intact."""


def read_small_file(path: Path, max_bytes: int, if_missing: str) -> bytes:
    try:
        with _open_regular(path) as file:
            # A read takes as much memory as it is asked for.
            content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    except FileNotFoundError:
        raise Damaged(f"{path.parent} has no {path.name}: {if_missing}") from None
    except NotADirectoryError:
        raise Damaged(f"{path} cannot be read: {path.parent} is not a folder") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise Damaged(f"{path} is damaged: it has more than the {max_bytes} bytes that such a file can have")
    return content


def check_size(path: Path, expected: int) -> None:
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise Damaged(f"{path.parent} has no {path.name}: the checkpoint is incomplete") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if size < expected:
        raise Damaged(f"{path} is truncated: it has {size} bytes, expected {expected}")
    if size > expected:
        raise Damaged(f"{path} has {size - expected} bytes after its last leaf, expected none")


def read_into(path: Path, offset: int, target: np.ndarray) -> None:
    """Fills an array of bytes; the file is open for no longer than that, so that few are open at any time."""
    view = memoryview(target)
    with _open_regular(path) as file:
        while view:  # a read may be short
            count = os.preadv(file.fileno(), [view], offset)
            if not count:
                raise Damaged(f"{path} is truncated: {len(view)} bytes at {offset} are missing")
            view, offset = view[count:], offset + count


def _open_regular(path: Path):
    """Opens without waiting: a pipe in the file's place may never send anything."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged(f"{path} is not a file")
    return file
