"""The array files: np.save records end to end, each a slice of a leaf. Every byte that is read is verified."""

import dataclasses
import io
import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardformer.checkpoint import checksums, documents
from shardformer.checkpoint.manifest import Index, Manifest, Piece
from shardformer.checkpoint.store import Damaged, Location
from shardformer.checkpoint.stores import check_sizes, read_into, store_of
from shardformer.errors import RunError

_ALIGNMENT = 64  # bytes: JAX uses memory without a copy if its address is a multiple of this


def file_name(process: int, processes: int) -> str:
    return "arrays.npy" if processes == 1 else f"arrays-{process:05d}-of-{processes:05d}.npy"


def write_arrays(path: Location, slices: Iterable[tuple[str, Index, np.ndarray]]) -> tuple[dict[str, list[Piece]], int]:
    """Writes a record of each (leaf name, index, array); returns each leaf's pieces and the bytes of the file."""
    pieces: dict[str, list[Piece]] = {}
    with store_of(path).create(path) as file:
        for name, index, array in slices:
            offset, data = file.tell(), array.reshape(-1).view(np.uint8)
            file.write(_header(array.dtype, array.shape))
            file.write(data.data)
            piece = Piece(path.name, offset, file.tell() - offset, index, checksums.checksum_blocks(data))
            pieces.setdefault(name, []).append(piece)
        return pieces, file.tell()


@dataclasses.dataclass(frozen=True)
class _HeaderRead:
    """A read of a record's header, which is compared with the header that np.save writes."""

    path: Location
    leaf: str
    offset: int
    length: int
    expected: bytes

    def run(self) -> None:
        header = np.empty(self.length, np.uint8)
        read_into(self.path, self.offset, header)
        if not _is_same_header(header.tobytes(), self.expected):
            raise Damaged(
                f"{self.path}: leaf {self.leaf!r} at byte {self.offset} has the header {header.tobytes()[:200]!r}, "
                f"expected {self.expected.rstrip()!r}; the file is damaged"
            )


@dataclasses.dataclass(frozen=True)
class _BlockRead:
    """A read of one block of a record's data into `target`, which is then verified."""

    path: Location
    leaf: str
    offset: int
    target: np.ndarray
    checksum: int

    def run(self) -> None:
        read_into(self.path, self.offset, self.target)
        got = checksums.compute_checksum(self.target)
        if got != self.checksum:
            raise Damaged(
                f"{self.path} is damaged: leaf {self.leaf!r}, bytes {self.offset} to {self.offset + self.target.size}, "
                f"has the checksum {got:016x}, expected {self.checksum:016x}"
            )


class Reader:
    """Reads any slices of the leaves, whatever slices were saved; blocks without wanted data are not read.

    A checkpoint whose tree.pkl is damaged is rejected, as its arrays may be another model's.
    """

    def __init__(self, folder: Location, manifest: Manifest):
        documents.check_tree(folder, manifest)
        self._folder, self._leaves = folder / manifest.subfolder, manifest.leaves
        check_sizes(self._folder, manifest.array_files())
        self._pool = ThreadPoolExecutor(store_of(folder).read_threads)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read_slices(self, name: str, wanted: Iterable[Index]) -> dict[Index, np.ndarray]:
        """Returns each slice in separate memory, aligned so that JAX can use it without another copy."""
        leaf, wanted = self._leaves[name], list(wanted)
        shapes = [tuple(stop - start for start, stop in index) for index in wanted]
        slices = dict(zip(wanted, allocate_aligned(shapes, leaf.dtype), strict=True))
        reads: list[_HeaderRead | _BlockRead] = []
        copies = []
        for piece in leaf.pieces:
            overlaps = {index: box for index in slices if (box := _overlap(piece.index, index)) is not None}
            if piece.index in overlaps:
                reads += self._reads(name, piece, slices[piece.index], [piece.index])
            elif overlaps:
                full = np.empty(piece.shape, leaf.dtype)
                reads += self._reads(name, piece, full, overlaps.values())
                copies += [
                    (slices[index][_slices_within(index, box)], full[_slices_within(piece.index, box)])
                    for index, box in overlaps.items()
                ]
        try:
            list(self._pool.map(lambda read: read.run(), reads))
        except OSError as error:
            files = ", ".join(sorted({str(read.path) for read in reads}))
            raise RunError(f"{files} cannot be read at leaf {name!r}: {error.strerror}") from None
        for target, source in copies:
            target[...] = source
        return slices

    def _reads(
        self, name: str, piece: Piece, array: np.ndarray, boxes: Iterable[Index]
    ) -> Iterator[_HeaderRead | _BlockRead]:
        """Yields the reads that fill the blocks of a piece's array that overlap these boxes of the leaf."""
        path, data = self._folder / piece.file, array.reshape(-1).view(np.uint8)
        header_bytes = piece.bytes - data.size
        yield _HeaderRead(path, name, piece.offset, header_bytes, _header(array.dtype, piece.shape))
        local = [tuple((a - low, b - low) for (a, b), (low, _) in zip(box, piece.index, strict=True)) for box in boxes]
        for number in sorted(
            {n for box in local for n in checksums.find_blocks(piece.shape, array.dtype.itemsize, box)}
        ):
            first, last = checksums.block_bounds(number, data.size)
            offset = piece.offset + header_bytes + first
            yield _BlockRead(path, name, offset, data[first:last], piece.checksums[number])


def allocate_aligned(shapes: list[tuple[int, ...]], dtype) -> list[np.ndarray]:
    """Allocates all arrays in one block of memory: the system backs large blocks with large pages."""
    dtype = np.dtype(dtype)
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    memory = np.empty(starts[-1] + _ALIGNMENT, np.uint8)
    memory = memory[-memory.ctypes.data % _ALIGNMENT :]
    return [
        memory[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def _overlap(one: Index, other: Index) -> Index | None:
    """Returns the intersection of two boxes, or None if it is empty."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _slices_within(index: Index, box: Index) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(index, box, strict=True))


def _is_same_header(got: bytes, expected: bytes) -> bool:
    """Compares two headers apart from their padding, whose length differs between versions of numpy."""
    prefix = expected[:8] + struct.pack("<H", max(len(got) - 10, 0))
    return got[:10] == prefix and got[-1:] == b"\n" and got[10:-1].rstrip(b" ") == expected[10:-1].rstrip(b" ")


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the header that np.save writes before the array's bytes."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()
