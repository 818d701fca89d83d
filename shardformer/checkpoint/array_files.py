"""The array files: np.save records end to end, each a slice of a leaf; every byte that is read is verified."""

import contextlib
import functools
import io
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shardformer.checkpoint import checksums
from shardformer.checkpoint.damage import Damaged, open_regular
from shardformer.checkpoint.manifest import Index, Leaf, Manifest, Piece
from shardformer.errors import RunError

_LINE = 64  # bytes: JAX takes memory as it is that begins at a multiple of so many
THREADS = min(8, os.cpu_count() or 1)  # read and verify blocks: neither holds the interpreter up


def file_name(process: int, processes: int) -> str:
    return "arrays.npy" if processes == 1 else f"arrays-{process:05d}-of-{processes:05d}.npy"


def write(path: Path, slices: Iterable[tuple[str, Index, np.ndarray]]) -> tuple[dict[str, list[Piece]], int]:
    """The records of (leaf name, index, array); returns each leaf's pieces and the bytes of the file."""
    pieces: dict[str, list[Piece]] = {}
    with open(path, "wb") as file:
        for name, index, array in slices:
            offset, data = file.tell(), array.reshape(-1).view(np.uint8)
            file.write(_header(array.dtype, array.shape))
            file.write(data)
            piece = Piece(path.name, offset, file.tell() - offset, index, checksums.checksums(data))
            pieces.setdefault(name, []).append(piece)
        return pieces, file.tell()


class Reader(contextlib.ExitStack):
    """Slices of leaves, of whatever pieces they were saved as; reads no block that holds nothing of them."""

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__()
        self._folder, self._manifest = folder, manifest
        self._files = {}

    def __enter__(self) -> "Reader":
        super().__enter__()
        self._pool = self.enter_context(ThreadPoolExecutor(THREADS))
        for name, entry in self._manifest.files.items():
            if "crc32" not in entry:
                self._files[name] = self.enter_context(_open(self._folder / name, entry["bytes"]))
        return self

    def read(self, name: str, wanted: Iterable[Index]) -> dict[Index, np.ndarray]:
        """Each in memory of its own, aligned as JAX can use it without another copy."""
        leaf = self._manifest.leaves[name]
        try:
            return self._read(name, leaf, wanted)
        except OSError as error:
            files = ", ".join(sorted({str(self._folder / piece.file) for piece in leaf.pieces}))
            raise RunError(f"{files} cannot be read at leaf {name!r}: {error.strerror}") from None

    def _read(self, name: str, leaf: Leaf, wanted: Iterable[Index]) -> dict[Index, np.ndarray]:
        wanted = list(wanted)
        shapes = [tuple(stop - start for start, stop in index) for index in wanted]
        parts = dict(zip(wanted, empty(shapes, leaf.dtype), strict=True))
        reads, copies = [], []
        for piece in leaf.pieces:
            common = {index: box for index in parts if (box := _common(piece.index, index)) is not None}
            if piece.index in common:
                reads += self._reads(name, piece, parts[piece.index], [piece.index])
            elif common:
                whole = np.empty(piece.shape, leaf.dtype)
                reads += self._reads(name, piece, whole, common.values())
                copies += [(parts[i][_within(i, box)], whole[_within(piece.index, box)]) for i, box in common.items()]
        list(self._pool.map(lambda read: read(), reads))
        for target, source in copies:
            target[...] = source
        return parts

    def _reads(self, name: str, piece: Piece, array: np.ndarray, boxes: Iterable[Index]) -> list[Callable[[], None]]:
        """What reads into an array of a piece's shape the blocks that hold these boxes of the leaf."""
        path, file = self._folder / piece.file, self._files[piece.file]
        data = array.reshape(-1).view(np.uint8)
        start = piece.offset + piece.bytes - data.size
        header = os.pread(file.fileno(), start - piece.offset, piece.offset)
        expected = _header(array.dtype, piece.shape)
        if not _same_header(header, expected):
            raise Damaged(
                f"{path}: leaf {name!r} at byte {piece.offset} has the header {header[:200]!r}, expected "
                f"{expected.rstrip()!r}; the file is damaged"
            )
        corner = [low for low, _ in piece.index]
        local = [tuple((a - low, b - low) for (a, b), low in zip(box, corner, strict=True)) for box in boxes]
        numbers = sorted({n for box in local for n in checksums.touched(piece.shape, array.dtype.itemsize, box)})

        def read(number: int) -> None:
            first, last = checksums.bounds(number, data.size)
            block = data[first:last]
            _read_into(path, file, start + first, block)
            got, written = checksums.checksum(block), piece.checksums[number]
            if got != written:
                raise Damaged(
                    f"{path} is damaged: leaf {name!r}, bytes {start + first} to {start + last}, has the checksum "
                    f"{got:016x}, expected {written:016x}"
                )

        return [functools.partial(read, number) for number in numbers]


def empty(shapes: list[tuple[int, ...]], dtype) -> list[np.ndarray]:
    """Each where a cache line begins, all from one piece of memory: the system gives large ones in large pages."""
    dtype = np.dtype(dtype)
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes)]
    room = np.empty(starts[-1] + _LINE, np.uint8)
    room = room[-room.ctypes.data % _LINE :]
    return [
        room[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def _open(path: Path, nbytes: int):
    try:
        file = open_regular(path)
        size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise Damaged(f"{path.parent} has no {path.name}: the checkpoint is incomplete") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if size < nbytes:
        file.close()
        raise Damaged(f"{path} is truncated: it has {size} bytes, expected {nbytes}")
    if size > nbytes:
        file.close()
        raise Damaged(f"{path} has {size - nbytes} bytes after its last leaf, expected none")
    return file


def _read_into(path: Path, file, offset: int, block: np.ndarray) -> None:
    view = memoryview(block)
    while view:  # a read may be short
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise Damaged(f"{path} is truncated: {len(view)} bytes at {offset} are missing")
        view, offset = view[count:], offset + count


def _common(one: Index, other: Index) -> Index | None:
    """The box that two have in common, if it holds anything."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _within(index: Index, box: Index) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(index, box, strict=True))


def _same_header(got: bytes, expected: bytes) -> bool:
    """Versions of numpy pad their headers to different lengths, which stand in two of the bytes."""
    prefix = expected[:8] + struct.pack("<H", max(len(got) - 10, 0))
    return got[:10] == prefix and got[-1:] == b"\n" and got[10:-1].rstrip(b" ") == expected[10:-1].rstrip(b" ")


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Exactly what np.save puts before the array's bytes."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()
