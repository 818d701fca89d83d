"""One array of a file of weights, which is read in parts when it is needed."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.errors import RunError


class Tensor(NamedTuple):
    """One array of a file, not yet read."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in the file
    strides: tuple[int, ...] | None = None  # in elements; None: row after row
    # Of an array in two or more pieces: the number of each one's first value, also below 0, and its offset.
    pieces: tuple[tuple[int, int], ...] = ()

    def row(self, number: int) -> "Tensor":
        """Returns one row of an array that is stored row after row, such as a layer."""
        shape = self.shape[1:]
        first = number * math.prod(shape)
        pieces = tuple((start - first, offset) for start, offset in self.pieces)
        return self._replace(shape=shape, offset=self.offset + first * self.dtype.itemsize, pieces=pieces)

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns rows of the array, or of the same values in another shape."""
        shape = seen or self.shape
        start, stop, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        if self.strides is not None:
            return self._read_strided(start, stop, shape)
        row_size = math.prod(shape[1:])
        values = self._read_values([(start * row_size, (stop - start) * row_size)])
        return values.reshape((stop - start, *shape[1:]) if shape else ())

    def _read_strided(self, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        strides, rows = self.strides or (), self.shape[0] if self.shape else 1
        each, rest = divmod(math.prod(shape[1:]), math.prod(self.shape[1:]) or 1)  # rows of the array in one of `shape`
        if strides == (1, rows) and not rest and (stop - start) * each < rows:  # a transposed matrix: not all of it
            count = (stop - start) * each
            spans = [(column * rows + start * each, count) for column in range(self.shape[1])]
            return self._read_values(spans).reshape(-1, count).T.reshape(stop - start, *shape[1:])
        last = sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        values = self._read_values([(0, 0 if 0 in self.shape else last + 1)])
        in_bytes = [stride * self.dtype.itemsize for stride in strides]
        whole = np.lib.stride_tricks.as_strided(values, self.shape, in_bytes, writeable=False)
        return whole.reshape(shape)[start:stop]

    def _read_values(self, spans: list[tuple[int, int]]) -> np.ndarray:
        """Reads spans of values: the number of the first, and their count."""
        pieces, values, filled = self.pieces or ((0, self.offset),), np.empty(sum(n for _, n in spans), self.dtype), 0
        content, itemsize = values.view(np.uint8).data, self.dtype.itemsize
        try:
            with open(self.path, "rb") as file:
                for start, count in spans:
                    ends = [first for first, _ in pieces[1:]] + [start + count]
                    for (first, offset), end in zip(pieces, ends, strict=True):
                        begin, stop = max(start, first), min(start + count, end)
                        if begin < stop:
                            file.seek(offset + (begin - first) * itemsize)
                            filled += file.readinto(content[filled : filled + (stop - begin) * itemsize])
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}") from None
        if filled < len(content):
            raise RunError(f"{self.path} was cut short while it was read: {self.name} is incomplete")
        return values


@dataclasses.dataclass(frozen=True)
class Computed:
    """An array that is computed from those of a file, all of it at once."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    compute: Callable[..., np.ndarray]

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns rows of the array, or of the same values in another shape."""
        return self.compute().reshape(seen or self.shape)[rows]
