"""The state of a model that is converted: arrays that are read when they are written elsewhere.

So no conversion has a full model in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

BLOCK = 16 * 2**20  # bytes of one read


@dataclasses.dataclass(frozen=True)
class Filled:
    """An array that `fill` computes into given memory, and `fill_row` one row of its first axis, such as a layer.

    np.asarray, and indexing without `fill_row`, compute all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[np.ndarray], None]
    fill_row: Callable[[np.ndarray, int], None] | None = None

    def __getitem__(self, index) -> np.ndarray:
        if self.fill_row is None or not isinstance(index, int):
            return np.asarray(self)[index]
        row = np.empty(self.shape[1:], self.dtype)
        self.fill_row(row, index)
        return row

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        self.fill(array)
        return array if dtype is None else array.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Readable:
    """An array on disk: `array[index]` reads the part that integers and slices name; np.asarray reads all."""

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


Array = np.ndarray | Filled | Readable
Leaves = Mapping[str, Array]  # our name -> the full array


class Moments(NamedTuple):
    """Adam's moments after `steps` updates."""

    steps: int
    mu: Leaves
    nu: Leaves


class State(NamedTuple):
    """The parameters of a checkpoint, and the optimizer's moments if it has them."""

    step: int
    params: Leaves
    moments: Moments | None = None


def constant(shape: tuple[int, ...], dtype, value) -> Filled:
    """Returns an array whose elements all have one value."""
    return Filled(tuple(shape), np.dtype(dtype), lambda whole: whole.fill(value))


def copy_into(whole: np.ndarray, source: Array) -> None:
    """Copies an array into memory of its shape, a block at a time."""
    if isinstance(source, Filled) and source.dtype == whole.dtype:
        source.fill(whole)  # once: each block would compute all of it
        return
    for rows in blocks(source.shape, source.dtype.itemsize):
        whole[rows] = source[rows]


def each_row(source: Array) -> Iterator[np.ndarray]:
    """Yields the rows of the first axis; an array that cannot compute one row is computed once."""
    source = np.asarray(source) if isinstance(source, Filled) and source.fill_row is None else source
    return (source[row] for row in range(source.shape[0]))


def blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Splits the first axis of an array into slices of about `BLOCK` bytes."""
    rows = shape[0] if shape else 1
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, BLOCK // max(row_bytes, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def flatten(params) -> dict:
    """Returns {module: {name: leaf}} as {"module/name": leaf}."""
    return {f"{module}/{name}": leaf for module, named in params.items() for name, leaf in named.items()}


def nest(like, flat: Mapping):
    """Returns {"module/name": leaf} as {module: {name: leaf}}, for the modules and names of `like`."""
    return {module: {name: flat[f"{module}/{name}"] for name in named} for module, named in like.items()}
