"""GPT-J's container: `shard_0/0.npz` to `shard_N/15.npz`, each shard's leaves in tree order, split into 16 pieces.

Nothing is unpickled, and arrays are read only when they are needed.
"""

import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from shardformer.convert.leaves import blocks
from shardformer.errors import RunError
from shardformer.files import open_regular

PIECES = 16
MAX_EXPANSION = 1032  # of deflate
BFLOAT16 = np.dtype(jnp.bfloat16)
_FOLDER = re.compile(r"shard_(0|[1-9][0-9]*)")
ON_DISK = np.dtype("V2")  # np.load returns bfloat16 as two bytes without a type


class Member(NamedTuple):
    """One leaf of one shard, not yet read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        self.copy_into(array)
        return array

    def copy_into(self, target: np.ndarray) -> None:
        """Copies the leaf into memory of its shape and any dtype, a block at a time."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.name) as file:
                fortran_order = _read_header(file)[1]
                rows = target.T if fortran_order else target
                for block in blocks(rows.shape, self.dtype.itemsize):
                    part = rows[block] if rows.ndim else rows
                    content = _read_exactly(file, part.size * self.dtype.itemsize)
                    part[...] = np.frombuffer(content, self.dtype).reshape(part.shape)
                file.read(1)  # at its end, zipfile compares the checksum
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            raise _damaged(self.path, error) from None


def has_shards(path: Path) -> bool:
    return (path / "shard_0").is_dir()


def count_shards(folder: Path) -> int:
    """Counts the shards, which must be numbered without a gap."""
    matches = (_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    present = {int(match[1]) for match in matches if match}
    gap = next(number for number in itertools.count() if number not in present)
    if gap < len(present):
        raise RunError(f"{folder / f'shard_{gap}'} is missing: copy the whole checkpoint")
    return len(present)


def list_members(folder: Path, shard: int) -> list[Member]:
    """Lists a shard's leaves in tree order."""
    return [member for piece in range(PIECES) for member in _piece(folder / f"shard_{shard}" / f"{piece}.npz")]


def write_shard(folder: Path, shard: int, leaves: list[Callable[[], np.ndarray]]) -> None:
    """Writes a shard's leaves in tree order; each is computed just before it is written."""
    (folder / f"shard_{shard}").mkdir()
    for piece, chunk in enumerate(_cut(leaves)):
        with zipfile.ZipFile(folder / f"shard_{shard}" / f"{piece}.npz", "w", allowZip64=True) as archive:
            for i, make in enumerate(chunk):  # in np.savez's format; np.savez needs all arrays at once
                leaf = make()
                with archive.open(f"arr_{i}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, leaf.view(ON_DISK) if leaf.dtype == BFLOAT16 else leaf)


def _cut(leaves: list) -> Iterator[list]:
    """Splits the leaves into pieces of nearly equal length, the longer pieces first."""
    each, larger = divmod(len(leaves), PIECES)
    ends = [each * (i + 1) + min(i + 1, larger) for i in range(PIECES)]
    return (leaves[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _piece(path: Path) -> list[Member]:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            return [Member(path, info.filename, *_header(archive, info, size)) for info in archive.infolist()]
    except FileNotFoundError:
        raise RunError(f"{path} is missing: a shard has the files 0.npz to {PIECES - 1}.npz") from None
    except OSError:
        raise
    except Exception as error:
        raise _damaged(path, error) from None


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, archive_bytes: int) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(info) as file:
        shape, _, dtype = _read_header(file)
        header_bytes = file.tell()
    nbytes = math.prod(max(size, 1) for size in shape) * dtype.itemsize
    sizes = all(type(size) is int and size >= 0 for size in shape)
    # Checked before memory of that shape is allocated. Pickled objects, which are never read, have no such size.
    if not sizes or (not dtype.hasobject and 0 not in shape and nbytes != info.file_size - header_bytes):
        raise ValueError(f"{info.filename} has {info.file_size} bytes, and is {dtype}{list(shape)!s:.200}")
    if nbytes >= 2**63 or nbytes > MAX_EXPANSION * archive_bytes:
        raise ValueError(f"{info.filename} would have {nbytes} bytes, more than the file can hold")
    return shape, BFLOAT16 if dtype == ON_DISK else dtype


def _read_header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"{file.name} has version {version} of the npy format, expected (1, 0)")
    return np.lib.format.read_array_header_1_0(file)


def _read_exactly(file, nbytes: int) -> bytearray:
    content = bytearray()
    while len(content) < nbytes:
        part = file.read(nbytes - len(content))
        if not part:
            raise ValueError(f"{nbytes - len(content)} bytes of {file.name} are missing")
        content += part
    return content


def _damaged(path: Path, error: Exception) -> RunError:
    """Describes damage: zipfile, zlib and numpy's parser raise nearly any exception for a damaged file."""
    return RunError(f"{path} is damaged ({type(error).__name__}: {error!s:.200}); copy it again")
