"""What lies on disk and is not what was written."""

import os
import stat
from pathlib import Path

from shardformer.errors import RunError


class Damaged(RunError):
    """This checkpoint cannot be trusted; an older one may be sound."""


def read_bytes(path: Path, most: int, absent: str) -> bytes:
    """A small file whole."""
    try:
        with open_regular(path) as file:
            content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)  # room for so much is taken at once
    except FileNotFoundError:
        raise Damaged(f"{path.parent} has no {path.name}: {absent}") from None
    except NotADirectoryError:
        raise Damaged(f"{path} cannot be read: {path.parent} is no folder") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise Damaged(f"{path} is damaged: it has more than the {most} bytes that such a file can have")
    return content


def open_regular(path: Path):
    """Opened for reading, without waiting for what a pipe in its place may never send."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged(f"{path} is no file")
    return file
