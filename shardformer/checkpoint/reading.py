"""Reads a checkpoint's files. Missing, truncated or too long files are damage; errors of the system are not."""

import numpy as np

from shardformer.checkpoint.store import Damaged, Location
from shardformer.checkpoint.stores import store_of
from shardformer.errors import RunError


def read_small_file(path: Location, max_bytes: int) -> bytes:
    try:
        content = store_of(path).read(path, max_bytes)
    except FileNotFoundError:
        raise Damaged(
            f"{path.parent} has no {path.name}: it is not a checkpoint of this version, or it is incomplete"
        ) from None
    except NotADirectoryError:
        raise Damaged(f"{path} cannot be read: {path.parent} is not a folder") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise Damaged(f"{path} is damaged: it has more than the {max_bytes} bytes that such a file can have")
    return content


def check_sizes(folder: Location, expected: dict[str, int]) -> None:
    try:
        sizes = store_of(folder).sizes(folder, expected)
    except OSError as error:
        raise RunError(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    for name, nbytes in expected.items():
        if name not in sizes:
            raise Damaged(f"{folder} has no {name}: the checkpoint is incomplete")
        if sizes[name] < nbytes:
            raise Damaged(f"{folder / name} is truncated: it has {sizes[name]} bytes, expected {nbytes}")
        if sizes[name] > nbytes:
            raise Damaged(f"{folder / name} has {sizes[name] - nbytes} bytes after its last leaf, expected none")


def read_into(path: Location, offset: int, target: np.ndarray) -> None:
    done = store_of(path).read_into(path, offset, target)
    if done < target.size:
        raise Damaged(f"{path} is truncated: {target.size - done} bytes at {offset + done} are missing")
