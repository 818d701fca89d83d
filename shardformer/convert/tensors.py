"""One array of a file of weights, which is read in parts when it is needed."""

import math
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

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns rows of the array, or of the same values in another shape."""
        shape = seen or self.shape
        start, stop, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        if self.strides is not None:
            return self._read_strided().reshape(shape)[start:stop]
        row_size = math.prod(shape[1:])
        values = self._read_values(start * row_size, (stop - start) * row_size)
        return values.reshape((stop - start, *shape[1:]) if shape else ())

    def _read_strided(self) -> np.ndarray:
        strides = self.strides or ()
        last = sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        values = self._read_values(0, 0 if 0 in self.shape else last + 1)
        in_bytes = [stride * self.dtype.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(values, self.shape, in_bytes, writeable=False)

    def _read_values(self, start: int, count: int) -> np.ndarray:
        size = count * self.dtype.itemsize
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset + start * self.dtype.itemsize)
                content = file.read(size)
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(content) < size:
            raise RunError(f"{self.path} was cut short while it was read: {self.name} is incomplete")
        return np.frombuffer(content, self.dtype)
