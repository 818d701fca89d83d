"""PyTorch's zip format (`pytorch_model.bin`): a pickle of tensors next to their bytes. Read without running anything.

The pickle may hold tensors in dictionaries and nothing else; each tensor is read from the archive when it is needed.
"""

import math
import os
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardformer.checkpoint.safe_pickle import ObjectMachine, run
from shardformer.convert.tensors import Tensor
from shardformer.errors import RunError, UsageError, describe_error, describe_value
from shardformer.files import open_regular

MAX_PICKLE = 4 * 2**20  # bytes: about 20,000 tensors
MAX_DIRECTORY = 8 * 2**20  # bytes of the archive's list of entries: about 80,000
DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "float32": np.float32, "float16": np.float16, "bfloat16": jnp.bfloat16, "float64": np.float64,
        "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.bool_,
    }.items()
}  # fmt: skip
_STORAGE_NAMES = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
STORAGES = {f"{name}Storage": DTYPES[dtype] for name, dtype in _STORAGE_NAMES.items()}
FUNCTIONS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
LEGACY = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x04\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")


class Name(NamedTuple):
    """A class or function that a pickle names; only those of `_find_name` exist."""

    module: str
    name: str


class Storage(NamedTuple):
    """The bytes of one or more tensors: an entry of the archive."""

    dtype: np.dtype | None  # None where the tensors name it
    key: str


class Record(NamedTuple):
    """A tensor as the pickle describes it, in elements of its storage."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Tensors(ObjectMachine):
    """The opcodes of a dictionary of tensors."""

    def run(self, opcode: str, argument) -> None:
        if self.run_object(opcode, argument):
            return
        put, pop = self._stack.append, self._pop
        match opcode:
            case "BINPERSID":
                put(_make_storage(*pop(1)))
            case "REDUCE":
                put(_call(*pop(2)))
            case "BUILD":  # the attributes of an OrderedDict: versions of modules
                pop(1)
            case _:
                raise UnpicklingError(
                    f"it has the opcode {opcode} ({describe_value(argument)}), which tensors do not need"
                )

    def _find_name(self, module, name) -> Name:
        return _find_name(module, name)


def _find_name(module, name) -> Name:
    known = (
        (module == "collections" and name == "OrderedDict")
        or (module == "torch._utils" and name in FUNCTIONS)
        or (module == "torch" and (name in STORAGES or name in DTYPES))
        or (module == "torch.storage" and name == "UntypedStorage")
    )
    if not known:
        raise UnpicklingError(
            f"it asks for {describe_value(module)}.{describe_value(name)}, and weights need only tensors"
        )
    return Name(module, name)


def _make_storage(described) -> Storage:
    kind, cls, key, _, _ = described
    if kind != "storage" or type(cls) is not Name or type(key) is not str or not key.isalnum():
        raise UnpicklingError("it has a storage that is not described as PyTorch describes one")
    return Storage(STORAGES.get(cls.name), key)


def _call(function, arguments):
    if type(function) is not Name or type(arguments) is not tuple:
        raise UnpicklingError("it calls something that is not a function")
    if function.name == "OrderedDict" and not arguments:
        return {}
    if function.name == "_rebuild_parameter":
        return arguments[0]
    if function.name == "_rebuild_tensor_v2":
        storage, offset, shape, strides = arguments[:4]
        return _make_record(storage, storage.dtype, offset, shape, strides)
    if function.name == "_rebuild_tensor_v3":
        storage, offset, shape, strides, _, _, dtype = arguments[:7]
        return _make_record(storage, DTYPES[dtype.name], offset, shape, strides)
    raise UnpicklingError(f"it calls {function.module}.{function.name} with unknown arguments")


def _make_record(storage, dtype, offset, shape, strides) -> Record:
    sizes = [offset, *shape, *strides]
    if type(storage) is not Storage or dtype is None or len(shape) != len(strides) or len(shape) > 16:
        raise UnpicklingError("it has a tensor that is not described as PyTorch describes one")
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise UnpicklingError("it has a tensor whose sizes are not whole numbers, at least 0")
    return Record(storage, dtype, offset, tuple(shape), tuple(strides))


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, not yet read."""
    try:
        with open_regular(path) as file:
            return _list_tensors(path, file)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except zipfile.BadZipFile as error:
        raise RunError(f"{path} is damaged: {error!s:.200}; copy it again") from None


def _list_tensors(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    head = file.read(16)
    if head in LEGACY or not head.startswith(b"PK"):
        raise UsageError(
            f"{path} is not in PyTorch's zip format (of version 1.6 and later); save the model again with "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    _check_directory(path, file)
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in entries or entries["data.pkl"].file_size > MAX_PICKLE:
            raise UsageError(f"{path} has no data.pkl of at most {MAX_PICKLE} bytes, as PyTorch's files have")
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise UsageError(f"{path} is compressed, which PyTorch's files are not; save the model again")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise UsageError(f"{path} was written by a big-endian machine; save the model again")
        records = _unpickle(path, archive.read(entries["data.pkl"]))
    offsets: dict[str, int] = {}
    return {name: _locate(path, file, name, record, entries, offsets) for name, record in records.items()}


def _check_directory(path: Path, file: BinaryIO) -> None:
    """Rejects an archive whose list of entries would take long to read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 66_000))
    tail = file.read()
    position = tail.rfind(b"PK\x05\x06")
    length = struct.unpack_from("<I", tail, position + 12)[0] if 0 <= position <= len(tail) - 22 else 0
    if length == 2**32 - 1:  # of zip64, whose record comes before
        position = tail.rfind(b"PK\x06\x06")
        length = struct.unpack_from("<Q", tail, position + 40)[0] if 0 <= position <= len(tail) - 56 else 0
    if length > MAX_DIRECTORY:
        raise UsageError(f"{path} lists entries in {length:,} bytes, more than the limit of {MAX_DIRECTORY:,}")


def _unpickle(path: Path, pickled: bytes) -> dict[str, Record]:
    try:
        content = run(pickled, _Tensors(), MAX_PICKLE)
        if not isinstance(content, dict) or not content:
            raise UnpicklingError("it is not a dictionary of tensors")
        if other := [name for name, value in content.items() if not isinstance(value, Record)]:
            raise UnpicklingError(f"{other[0]!r:.80} is not a tensor")
    except Exception as error:
        raise UsageError(
            f"{path} was not loaded, as its pickle may hold tensors only: {describe_error(error)}"
        ) from None
    return content


def _locate(
    path: Path, file: BinaryIO, name: str, record: Record, entries: dict[str, zipfile.ZipInfo], offsets: dict[str, int]
) -> Tensor:
    """Finds the bytes of a tensor in the file, and checks that they are in its storage."""
    entry = entries.get(f"data/{record.storage.key}")
    if entry is None:
        raise RunError(f"{path} lacks the entry data/{record.storage.key} of {name!r:.100}; copy it again")
    itemsize = record.dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(record.shape, record.strides, strict=True))
    elements = 0 if 0 in record.shape else last + 1
    if math.prod(record.shape) > elements:
        raise UsageError(f"{path}: {name!r:.100} repeats the numbers of its storage; save the model again")
    if (record.offset + elements) * itemsize > entry.file_size:
        raise RunError(f"{path} is damaged: {name!r:.100} reaches beyond its storage of {entry.file_size} bytes")
    if record.storage.key not in offsets:
        offsets[record.storage.key] = _find_data(path, file, entry)
    dense = tuple(math.prod(record.shape[axis + 1 :]) for axis in range(len(record.shape)))
    matters = [size > 1 for size in record.shape]  # an axis of size 1 may have any stride
    is_dense = all(a == b for a, b, used in zip(record.strides, dense, matters, strict=True) if used)
    strides = None if is_dense else record.strides
    start = offsets[record.storage.key] + record.offset * itemsize
    return Tensor(path, name, record.dtype, record.shape, start, strides)


def _find_data(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Returns where the bytes of an entry begin: after a header whose length is its own."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        raise RunError(f"{path} is damaged: the entry {entry.filename!r:.80} has no header; copy it again")
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    start = entry.header_offset + 30 + name_length + extra_length
    if start + entry.file_size > file.seek(0, os.SEEK_END):
        raise RunError(f"{path} is damaged: the entry {entry.filename!r:.80} ends after the file; copy it again")
    return start
