"""Arrays that are read when they are written elsewhere, so that no conversion holds a whole model."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

BLOCK = 16 * 2**20  # bytes that are read at once


@dataclasses.dataclass(frozen=True)
class Filled:
    """An array to be: `fill` writes it into memory of its shape. np.asarray(...) is all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[np.ndarray], None]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        self.fill(array)
        return array if dtype is None else array.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Readable:
    """An array on disk: `array[index]` reads that part, by whole numbers and slices. np.asarray(...) is all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[tuple[int, int], ...]], np.ndarray]  # of (start, stop) for each axis

    def __getitem__(self, index) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        index = () if index == (Ellipsis,) else index
        index += (slice(None),) * (len(self.shape) - len(index))
        spans = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        bounds = tuple(span.indices(size)[:2] for span, size in zip(spans, self.shape, strict=True))
        array = self.read(bounds)
        return array[tuple(0 if isinstance(i, int) else slice(None) for i in index)]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[...] if dtype is None else self[...].astype(dtype, copy=False)


def constant(shape: tuple[int, ...], dtype, value) -> Filled:
    return Filled(tuple(shape), np.dtype(dtype), lambda whole: whole.fill(value))


def copy_into(whole: np.ndarray, source: Readable) -> None:
    for rows in blocks(source.shape, source.dtype.itemsize):
        whole[rows] = source[rows]


def blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """The first axis in parts of about `BLOCK` bytes."""
    rows = shape[0] if shape else 1
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, BLOCK // max(row_bytes, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def flatten(params) -> dict:
    """{module: {name: leaf}} as {"module/name": leaf}."""
    return {f"{module}/{name}": leaf for module, named in params.items() for name, leaf in named.items()}


def nest(like, flat: dict):
    """The other way, for the modules and names of `like`."""
    return {module: {name: flat[f"{module}/{name}"] for name in named} for module, named in like.items()}
