"""A table of 64-bit values on the disk, a row for each document of a corpus."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class SketchFile:
    """Columns of values in a file without a name, which vanishes with the process.

    Threads append blocks of documents in any order; each block has its place in the order of the documents.
    """

    def __init__(self, folder: Path, columns: int):
        self.columns = columns
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self._blocks: list[tuple[tuple[int, int], int, int]] = []  # (place, offset in values, documents)
        self._size = 0

    def append(self, place: tuple[int, int], rows: np.ndarray) -> None:
        """Writes the rows of some documents: uint64 [columns, documents]."""
        with self._lock:
            self._file.write(np.ascontiguousarray(rows, np.uint64).data)
            self._blocks.append((place, self._size, rows.shape[1]))
            self._size += rows.size

    def sort(self) -> int:
        """Numbers the documents in the order of their places; returns how many there are."""
        self._file.flush()
        self._blocks.sort()
        self._offsets = np.array([offset for _, offset, _ in self._blocks], np.int64)
        self._counts = np.array([count for _, _, count in self._blocks], np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._values = np.memmap(self._file, np.uint64, "r") if self._size else np.zeros(0, np.uint64)
        return int(self._counts.sum())

    def read_blocks(self, column: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (number of the first document, values) of each block of a column."""
        for offset, count, start in zip(self._offsets, self._counts, self._starts, strict=True):
            first = offset + column * count
            yield int(start), np.asarray(self._values[first : first + count])

    def gather(self, columns: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Returns the values of some documents: uint64 [documents, columns]."""
        blocks = np.searchsorted(self._starts, documents, side="right") - 1
        first = self._offsets[blocks] + documents - self._starts[blocks]
        return np.asarray(self._values[first[:, None] + self._counts[blocks][:, None] * columns])

    def close(self) -> None:
        self._values = np.zeros(0, np.uint64)
        self._file.close()
