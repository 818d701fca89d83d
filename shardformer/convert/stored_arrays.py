"""The arrays of a checkpoint, of GPT-J's shards or of files of weights, under one interface; read one at a time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardformer import checkpoint, storage
from shardformer.checkpoint import array_files, documents
from shardformer.checkpoint.manifest import read_manifest
from shardformer.checkpoint.store import Location
from shardformer.convert import shard_files, weight_files
from shardformer.errors import RunError, UsageError
from shardformer.messages import silence

_BLOCK = 2**20  # values that are converted to float64 at a time


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of any format, not yet read."""

    dtype: np.dtype
    shape: tuple[int, ...]
    spec: str  # how it was split when it was saved; "" if the format does not store that
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of one array; norm and largest are of its finite values."""

    norm: float
    largest: float  # absolute value
    non_finite: int


def find_source(path: Location) -> Location:
    """Returns the path, or a run's newest checkpoint; a folder of another format in a bucket is copied to a disk."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    result = (checkpoint.newest_step_folder(path) if path.is_dir() else None) or path
    if (result / "manifest.json").is_file():
        return result
    with silence():  # standard output is for the arrays
        return storage.local_path(result)


@contextlib.contextmanager
def open_arrays(path: Location) -> Iterator[dict[str, StoredArray]]:
    """Yields the arrays of a path that `find_source` returned, by name."""
    if (path / "manifest.json").is_file():
        stored = read_manifest(path)
        documents.check_documents(path, stored)
        with array_files.Reader(path, stored) as reader:
            yield {name: _from_leaf(reader, name, leaf) for name, leaf in sorted(stored.leaves.items())}
    elif isinstance(path, Path) and path.is_dir() and shard_files.has_shards(path):
        yield {
            f"shard_{shard}/{member.path.name}/{member.name}": _from_tensor(member)
            for shard in range(shard_files.count_shards(path))
            for member in shard_files.list_members(path, shard)
        }
    elif isinstance(path, Path) and weight_files.has_weights(path):
        yield {name: _from_tensor(tensor) for name, tensor in sorted(weight_files.find_tensors(path).items())}
    else:
        raise UsageError(
            f"{path} is not a run, a checkpoint (manifest.json), GPT-J's shards (shard_0/0.npz ...), safetensors or "
            "PyTorch's files"
        )


def _from_leaf(reader: array_files.Reader, name: str, leaf) -> StoredArray:
    whole = tuple((0, size) for size in leaf.shape)
    spec = ", ".join("+".join(axes) if isinstance(axes, list) else axes or "-" for axes in leaf.spec or ())
    return StoredArray(np.dtype(leaf.dtype), leaf.shape, spec, lambda: reader.read_slices(name, [whole])[whole])


def _from_tensor(tensor) -> StoredArray:
    return StoredArray(np.dtype(tensor.dtype), tuple(tensor.shape), "", tensor.read)


def measure(array: np.ndarray) -> Statistics:
    squares, largest, non_finite = 0.0, 0.0, 0
    for block in _blocks(array):
        finite = block[np.isfinite(block)]
        squares += float(finite @ finite)
        largest = max(largest, float(np.abs(finite).max(initial=0.0)))
        non_finite += block.size - finite.size
    return Statistics(squares**0.5, largest, non_finite)


def measure_difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns the largest absolute difference, and its norm relative to `a`; zeros for equal bytes."""
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return 0.0, 0.0
    largest, squares, whole = 0.0, 0.0, 0.0
    for one, other in zip(_blocks(a), _blocks(b), strict=True):
        with np.errstate(invalid="ignore"):
            gap = np.abs(one - other)
        gap[np.isnan(gap)] = np.inf  # a NaN differs from everything, and inf from inf by an unknown amount
        gap[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
        largest = max(largest, float(gap.max(initial=0.0)))
        finite = one[np.isfinite(one)]
        squares, whole = squares + float(gap @ gap), whole + float(finite @ finite)
    return largest, (squares / whole) ** 0.5 if whole else float("inf") if squares else 0.0


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        try:
            yield flat[start : start + _BLOCK].astype(np.float64)
        except (TypeError, ValueError):
            raise RunError(f"an array of {flat.dtype} holds no numbers that can be measured") from None
