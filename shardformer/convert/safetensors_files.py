"""The safetensors format: 8 bytes with the header's length, a JSON header, raw arrays. Read and written in blocks.

A header is data from strangers: nothing in it is believed before it fits the file.
"""

import json
import math
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from shardformer.convert.leaves import blocks
from shardformer.errors import RunError, UsageError
from shardformer.files import open_regular, read_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100 * 2**20  # bytes, as the format's own library allows
DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
        "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|msgpack|h5)")


class Tensor(NamedTuple):
    """One array of a file, not yet read."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in the file

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Rows of the array, or of the same bytes seen as another shape."""
        shape = seen or self.shape
        start, stop, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        row_bytes = self.dtype.itemsize * math.prod(shape[1:])
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset + start * row_bytes)
                content = file.read((stop - start) * row_bytes)
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(content) < (stop - start) * row_bytes:
            raise RunError(f"{self.path} was cut short while it was read: {self.name} is incomplete")
        return np.frombuffer(content, self.dtype).reshape((stop - start, *shape[1:]) if shape else ())


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """All arrays of a folder with one file or several; those of several are found by their index."""
    if (folder / INDEX).is_file():
        places = _read_index(folder / INDEX)
        headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
        for name, file in places.items():
            if name not in headers[file]:
                raise RunError(f"{folder / INDEX}: {name!r:.100} is not in {file}; copy the folder again")
        return {name: headers[file][name] for name, file in places.items()}
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    pickled = [path.name for path in sorted(folder.iterdir()) if _PICKLED.fullmatch(path.name)]
    if pickled:
        raise UsageError(
            f"{folder / pickled[0]} is not safetensors: a pickle runs code when it is read, so it is refused; save the "
            "model again with save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise UsageError(f"{folder} has no weights: expected {SINGLE}, or {INDEX} and the files that it names")


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = _parse_json(path, read_bytes(path, MAX_HEADER))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise RunError(f"{path} is damaged: weight_map is not an object of names and files")
    for file in places.values():
        if not _FILE.fullmatch(file):
            raise UsageError(
                f"{path} names {file!r:.100}: a file of the index lies in its own folder, NAME.safetensors"
            )
    return places


def read_header(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 <= length <= min(MAX_HEADER, size - 8):
                raise _damaged(path, f"its header should have {length} bytes, and the file has {size}")
            header = _parse_json(path, file.read(length))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, _nbytes(tensor))):
        if tensor.offset != end:
            raise _damaged(path, f"{tensor.name!r:.100} begins at byte {tensor.offset}, expected {end}")
        end += _nbytes(tensor)
    if end != size:
        raise _damaged(path, f"its arrays end at byte {end}, and the file has {size}")
    return tensors


def _tensor(path: Path, name: str, entry, start: int) -> Tensor:
    what = f"{name!r:.100} is described as {entry!r:.200}"
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise _damaged(path, what)
    if dtype not in DTYPES:
        raise UsageError(f"{path}: {name!r:.100} has dtype {dtype!r:.40}; known are {', '.join(DTYPES)}")
    tensor = Tensor(path, name, DTYPES[dtype], tuple(shape), start + offsets[0])
    if len(shape) > 16 or offsets[1] - offsets[0] != _nbytes(tensor):
        raise _damaged(path, f"{what}, which does not fit its shape and dtype")
    return tensor


def _are_sizes(values) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _nbytes(tensor) -> int:
    return tensor.dtype.itemsize * math.prod(tensor.shape)


def _parse_json(path: Path, content: bytes) -> dict:
    def unique(pairs: list) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name appears twice")
        return dict(pairs)

    try:
        parsed = json.loads(content, object_pairs_hook=unique)
        if not isinstance(parsed, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{error!s:.200}") from None
    return parsed


def _damaged(path: Path, why: str) -> RunError:
    return RunError(f"{path} is damaged: {why}; copy it again")


class Made(NamedTuple):
    """One array to write: `make` returns it when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(folder: Path, arrays: list[Made], shard_bytes: int) -> None:
    """One file, or several of at most `shard_bytes` (and at least one array) with their index."""
    groups: list[list[Made]] = [[]]
    for array in arrays:
        if groups[-1] and sum(map(_nbytes, groups[-1])) + _nbytes(array) > shard_bytes:
            groups.append([])
        groups[-1].append(array)
    if len(groups) == 1:
        write_file(folder / SINGLE, groups[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        write_file(folder / name, group)
    places = {array.name: name for name, group in zip(names, groups, strict=True) for array in group}
    index = {"metadata": {"total_size": sum(map(_nbytes, arrays))}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, arrays: list[Made]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for array in arrays:
        begin, end = end, end + _nbytes(array)
        header[array.name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            made = array.make()
            if made.shape != array.shape:
                raise ValueError(f"{array.name} is {made.shape}, announced as {array.shape}")
            for rows in blocks(made.shape, 4):
                file.write(
                    np.ascontiguousarray(made[rows] if made.ndim else made, array.dtype).reshape(-1).view(np.uint8)
                )
