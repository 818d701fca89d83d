"""Flax's arrays in MessagePack: `flax_model.msgpack` of Hugging Face's folders, and EasyLM's streams.

An array is an extension of type 1: its shape, the name of its dtype and its bytes, which are read when they are needed.
One of more than 2**30 bytes is a map of pieces.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Union

import numpy as np

from shardformer.convert.msgpack_reader import Reader
from shardformer.convert.tensors import Tensor
from shardformer.convert.torch_files import DTYPES
from shardformer.errors import RunError, UsageError
from shardformer.files import open_regular

ARRAYS = (1, 3)  # types of extensions: an array, and a scalar as an array without axes
MAX_DEPTH = 16
MAX_ENTRIES = 100_000  # of all maps; the largest public models have fewer than 10,000 arrays a file
CHUNKED = "__msgpack_chunked_array__"
STATE, NO_PARAMETERS = ("params", "params"), ("opt_state", "step")  # parts of a stream of a complete training state


class Record(NamedTuple):
    """An array in one piece."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


Tree = Union[Record, int, dict[str, "Tree"]]  # noqa: UP007  # `|` takes no name of a type that is not yet defined


def to_torch_name(name: str) -> str:
    """Returns PyTorch's name of Flax's `transformer/h/0/ln_1/scale`, with which an index names its arrays too."""
    *modules, last = name.replace("/", ".").split(".")
    return ".".join([*modules, "weight" if last in ("kernel", "scale", "embedding") else last])


def to_torch(tensor: Tensor) -> Tensor:
    """Returns an array of Flax under PyTorch's name; the matrix of a layer, [inputs, outputs], is transposed."""
    if tensor.name.endswith(".kernel") and len(tensor.shape) == 2:
        inputs, outputs = tensor.shape
        tensor = tensor._replace(shape=(outputs, inputs), strides=(1, outputs))
    return tensor._replace(name=to_torch_name(tensor.name))


def read_flax_file(path: Path) -> dict[str, Tensor]:
    """Returns the arrays of a file under PyTorch's names and with PyTorch's axes, not yet read."""
    with _open(path) as reader:
        tree = _Objects(reader).read_tree()
        if reader.position != reader.size:
            raise reader.damaged(f"{reader.size - reader.position:,} bytes follow its end")
    tensors = [to_torch(tensor) for tensor in _list_tensors(path, "", tree)]
    result = {tensor.name: tensor for tensor in tensors}
    if len(result) < len(tensors):
        raise UsageError(f"{path} has two arrays of one name in PyTorch; save the model again")
    return result


def is_stream(path: Path) -> bool:
    """Returns whether a file starts as a stream does: with a pair, whose first half is a list of strings."""
    try:
        with open_regular(path) as file:
            start = file.read(3)
    except OSError:
        return False
    return len(start) == 3 and start[0] == 0x92 and 0x91 <= start[1] <= 0x9F and 0xA0 <= start[2] <= 0xBF


def read_stream(path: Path) -> dict[str, Tensor]:
    """Returns the parameters of a stream of pairs (names of modules, a serialised array) under Flax's names."""
    result: dict[str, Tensor] = {}
    with _open(path) as reader:
        objects = _Objects(reader)
        while reader.position < reader.size:
            names = objects.read_key()
            end = reader.expect("bin", "str") + reader.position
            if names[:2] == STATE or names[0] not in NO_PARAMETERS:
                name = ".".join(names[2:] if names[:2] == STATE else names)
                for tensor in _list_tensors(path, name, objects.read_tree()):
                    if result.setdefault(tensor.name, tensor) is not tensor:
                        raise UsageError(f"{path} has two arrays named {tensor.name!r:.100}")
                if reader.position != end:
                    raise reader.damaged(f"{name!r:.100} ends at byte {reader.position}, expected {end}")
            reader.skip_to(end)
    return result


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Reader]:
    try:
        with open_regular(path) as file:
            yield Reader(path, file)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


class _Objects:
    """The maps and arrays of one file, all of which count towards its limit."""

    def __init__(self, reader: Reader):
        self._reader, self._entries = reader, 0

    def read_tree(self, depth: int = 0) -> Tree:
        reader, start = self._reader, self._reader.position
        kind, value = reader.read_head()
        if kind == "ext":
            return self._read_array(value)
        if kind in ("int", "true", "false"):  # of the description of an array in pieces
            return value
        if kind != "map":
            raise UsageError(f"{reader.path} has a {kind} at byte {start}, and weights have maps and arrays there")
        if depth == MAX_DEPTH:
            raise UsageError(f"{reader.path} has maps in more than {MAX_DEPTH} levels, which no model has")
        self._count(value)
        result: dict[str, Tree] = {}
        for _ in range(value):
            name = reader.read_text()
            if name in result:
                raise UsageError(f"{reader.path} has two arrays named {name!r:.100}")
            result[name] = self.read_tree(depth + 1)
        return result

    def read_key(self) -> tuple[str, ...]:
        """Reads the start of a pair of a stream, and the list of strings that names its array."""
        self._count(1)
        reader = self._reader
        if reader.expect("array") != 2 or not 0 < (parts := reader.expect("array")) <= MAX_DEPTH:
            raise UsageError(f"{reader.path} has no pair of a name and an array before byte {reader.position}")
        return tuple(reader.read_text() for _ in range(parts))

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            raise UsageError(f"{self._reader.path} has more arrays than the limit of {MAX_ENTRIES:,}")

    def _read_array(self, length: int) -> Record:
        reader = self._reader
        (kind,) = reader.take(1)
        start, end = reader.position, reader.position + length
        if kind not in ARRAYS:
            raise UsageError(f"{reader.path} has an extension of type {kind} at byte {start}, expected an array's, 1")
        if reader.expect("array") != 3 or (axes := reader.expect("array")) > MAX_DEPTH:
            raise reader.damaged(f"the array at byte {start} is not described as Flax describes one")
        shape = tuple(reader.expect("int") for _ in range(axes))
        name = reader.read_text()
        if name not in DTYPES:
            raise UsageError(f"{reader.path} has an array of dtype {name!r:.40}; known are {', '.join(DTYPES)}")
        size = reader.expect("bin", "str")
        record = Record(DTYPES[name], shape, reader.position)
        expected = record.dtype.itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or size != expected or reader.position + size != end:
            raise reader.damaged(f"the array at byte {start} is {list(shape)} of {name}, and has {size:,} bytes")
        reader.skip_to(end)
        return record


def _list_tensors(path: Path, name: str, tree: Tree) -> list[Tensor]:
    """Lists the arrays of a tree; `name` is that of the tree."""
    if isinstance(tree, Record):
        return [Tensor(path, name, *tree)]
    if isinstance(tree, int):
        raise UsageError(f"{path}: {name!r:.100} is a number, and weights have only arrays")
    if CHUNKED in tree:
        return [_join_pieces(path, name, tree)]
    prefix = f"{name}." if name else ""
    return [tensor for part, inside in tree.items() for tensor in _list_tensors(path, f"{prefix}{part}", inside)]


def _join_pieces(path: Path, name: str, tree: dict[str, Tree]) -> Tensor:
    shape, pieces = (_to_list(tree.get(key)) for key in ("shape", "chunks"))
    records = [piece for piece in pieces if isinstance(piece, Record)]
    sizes = [size for size in shape if isinstance(size, int) and size >= 0]
    counts = [math.prod(record.shape) for record in records]
    same = len({record.dtype for record in records}) == 1
    if not same or len(records) != len(pieces) or len(sizes) != len(shape) or sum(counts) != math.prod(sizes):
        raise RunError(f"{path} is damaged: the pieces of {name!r:.100} do not have its {shape!r:.80}; copy it again")
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    places = tuple((first, record.offset) for first, record in zip(firsts, records, strict=True))
    return Tensor(path, name, records[0].dtype, tuple(sizes), records[0].offset, pieces=places)


def _to_list(tree: Tree | None) -> list[Tree]:
    """Returns the values of {"0": ..., "1": ...}; none for another tree."""
    numbered = tree if isinstance(tree, dict) else {}
    return [numbered[key] for key in map(str, range(len(numbered))) if key in numbered]
