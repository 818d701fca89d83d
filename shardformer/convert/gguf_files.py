"""The container of GGUF, version 3: keys with values, the list of arrays, and their bytes. Written array by array."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shardformer.convert.gguf_codes import KINDS
from shardformer.convert.leaves import blocks

ALIGNMENT = 32  # bytes
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


class CreatedArray(NamedTuple):
    """One array to write: `make` computes its float32 values just before they are written."""

    name: str
    shape: tuple[int, ...]
    kind: str  # of KINDS
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // KINDS[self.kind].values * KINDS[self.kind].size


def write_file(path: Path, keys: dict[str, Any], arrays: list[CreatedArray]) -> None:
    """Writes a file. Values of keys are booleans, whole numbers, floats, strings, or lists of one of these."""
    with open(path, "wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(arrays), len(keys)))
        for key, value in keys.items():
            file.write(_pack_text(key) + _pack_typed(value))
        offset = 0
        for array in arrays:
            sizes = array.shape[::-1]  # the innermost first
            head = _pack_text(array.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
            file.write(head + struct.pack("<IQ", KINDS[array.kind].code, offset))
            offset += array.nbytes + -array.nbytes % ALIGNMENT
        _align(file)
        for array in arrays:
            _write_array(file, array)


def _write_array(file: BinaryIO, array: CreatedArray) -> None:
    values = array.make()
    if values.shape != array.shape:
        raise ValueError(f"{array.name} is {values.shape}, announced as {array.shape}")
    rows = values.reshape(-1, values.shape[-1])
    for part in blocks(rows.shape, 4):
        block = KINDS[array.kind].encode(np.ascontiguousarray(rows[part], np.float32))
        file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    _align(file)


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _pack_text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _pack_typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _find_kind(value[0]) if value else _STRING
        kind = _INT32 if kind == _UINT32 else kind  # as llama.cpp reads lists
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_pack(item, kind) for item in value)
    kind = _find_kind(value)
    return struct.pack("<I", kind) + _pack(value, kind)


def _find_kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _UINT32 if value >= 0 else _INT32
    return _FLOAT32 if isinstance(value, float) else _STRING


def _pack(value: Any, kind: int) -> bytes:
    if kind == _STRING:
        return _pack_text(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
