"""The safetensors format: 8 bytes with the header's length, a JSON header, raw arrays. Read and written in blocks.

A header is untrusted: it is checked against the file before it is used.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardformer.convert.leaves import blocks
from shardformer.convert.tensors import Tensor
from shardformer.errors import RunError, UsageError
from shardformer.files import open_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 16 * 2**20  # bytes; read in 2 s, whatever it holds
MAX_ARRAYS = 100_000  # the largest public models have fewer than 10,000 arrays a file
DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
        "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 <= length <= size - 8:
                raise _damaged(path, f"its header should have {length} bytes, and the file has {size}")
            if length > MAX_HEADER:
                raise UsageError(f"{path} has a header of {length:,} bytes, more than the limit of {MAX_HEADER:,}")
            content = file.read(length)
            # Before it is parsed: each array is an object with two lists.
            if max(content.count(b"{"), content.count(b"[") // 2) > MAX_ARRAYS:
                raise UsageError(f"{path} has more arrays than the limit of {MAX_ARRAYS:,}")
            header = parse_json(path, content)
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
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    dtype = fields.get("dtype")
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


def parse_json(path: Path, content: bytes) -> dict:
    def unique(pairs: list) -> dict:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name appears twice")
        return result

    try:
        parsed = json.loads(content, object_pairs_hook=unique)
        if not isinstance(parsed, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{error!s:.200}") from None
    return parsed


def _damaged(path: Path, why: str) -> RunError:
    return RunError(f"{path} is damaged: {why}; copy it again")


class CreatedTensor(NamedTuple):
    """One array to write: `make` computes it just before it is written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(folder: Path, arrays: list[CreatedTensor], shard_bytes: int) -> None:
    """Writes one file, or more of at most `shard_bytes` (and at least one array) with their index."""
    groups: list[list[CreatedTensor]] = [[]]
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


def write_file(path: Path, arrays: list[CreatedTensor]) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for array in arrays:
        begin, end = end, end + _nbytes(array)
        header[array.name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            created = array.make()
            if created.shape != array.shape:
                raise ValueError(f"{array.name} is {created.shape}, announced as {array.shape}")
            for rows in blocks(created.shape, 4):
                block = np.ascontiguousarray(created[rows] if created.ndim else created, array.dtype)
                file.write(block.reshape(-1).view(np.uint8).data)
