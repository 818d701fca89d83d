"""The two array files: `arrays.npy`, np.save records end to end, and `tree.pkl`, the name, dtype and shape of each.

Nothing that is read is believed: a header must be, byte for byte, the one that its leaf would be written with, so
numpy's parser never sees it, and a size is compared with the file before a byte is allocated.
"""

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardformer.errors import RunError

ARRAYS = "arrays.npy"
TREE = "tree.pkl"
PICKLE_PROTOCOL = 4  # fixed, so that a newer Python writes what an older one reads

# What it takes to write a Layout, and no more: others (LONG_BINPUT, BYTEARRAY8) claim as much memory as the file says.
_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
}

# Name -> (dtype name, shape), in the order of the records. The dtype is here because np.save writes bfloat16 as '<V2'.
Layout = dict[str, tuple[str, tuple[int, ...]]]


def layout_of(named: dict) -> Layout:
    return {name: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in named.items()}


def write(folder: Path, layout: Layout, arrays: Iterator[np.ndarray]) -> None:
    """Both files; `arrays` come one at a time, in the order of `layout`."""
    with open(folder / ARRAYS, "wb") as file:
        for dtype, shape in layout.values():
            file.write(_header(np.dtype(dtype), shape))
            file.write(np.asarray(next(arrays), order="C").reshape(-1).view(np.uint8))
    with open(folder / TREE, "wb") as file:
        pickle.dump(layout, file, protocol=PICKLE_PROTOCOL)


def read_layout(folder: Path) -> Layout:
    """tree.pkl, opened without running anything in it."""
    path = folder / TREE
    try:
        pickled = path.read_bytes()
        _refuse_opcodes(pickled)
        stream = io.BytesIO(pickled)
        layout = _PlainUnpickler(stream).load()
        rest = stream.read()
    except FileNotFoundError:
        raise RunError(f"{folder} is not a checkpoint: it has no {TREE}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RunError(f"{path} cannot be read: {error or type(error).__name__}") from None
    if rest or not _is_layout(layout):
        raise RunError(f"{path} is damaged: expected one dict of leaf name -> (dtype name, shape) and nothing else")
    return layout


class Records:
    """Every record of an arrays.npy, found and checked; `read` maps one without loading the others."""

    def __init__(self, folder: Path, layout: Layout):
        self.path = folder / ARRAYS
        self._layout = layout
        try:
            with open(self.path, "rb") as file:
                self._starts = self._locate(file)
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}; the checkpoint is incomplete") from None

    def read(self, name: str) -> np.ndarray:
        """The leaf as a view of the file: copy what is needed, for the view ends with the file."""
        dtype, shape = self._layout[name]
        nbytes = _nbytes(np.dtype(dtype), shape)
        if nbytes == 0:
            return np.empty(shape, dtype)
        try:
            raw = np.memmap(self.path, np.uint8, "r", offset=self._starts[name], shape=(nbytes,))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} cannot be read at leaf {name!r}: {error}") from None
        return raw.view(np.ndarray).view(dtype).reshape(shape)

    def _locate(self, file) -> dict[str, int]:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        starts = {}
        for name, (dtype, shape) in self._layout.items():
            self._check_header(file, name, _header(self._dtype(name, dtype), shape))
            starts[name] = file.tell()
            nbytes = _nbytes(np.dtype(dtype), shape)
            if starts[name] + nbytes > size:
                raise RunError(
                    f"{self.path} is truncated: leaf {name!r} takes {nbytes} bytes, {size - starts[name]} are left"
                )
            file.seek(nbytes, io.SEEK_CUR)
        if file.tell() != size:
            raise RunError(f"{self.path} has {size - file.tell()} bytes after its last leaf, expected none")
        return starts

    def _dtype(self, name: str, dtype: str) -> np.dtype:
        try:
            known = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):
            known = None
        if known is None or known.name != dtype or known.hasobject:
            raise RunError(f"{self.path.with_name(TREE)}: leaf {name!r} has the unknown dtype {dtype[:40]!r}")
        return known

    def _check_header(self, file, name: str, expected: bytes) -> None:
        start = file.tell()
        prefix = file.read(10)
        if prefix[:8] == expected[:8] and len(prefix) == 10:
            (length,) = struct.unpack("<H", prefix[8:])
            got = file.read(length)
            # Versions of numpy pad their headers to different lengths.
            if len(got) == length and got.rstrip(b" \n") == expected[10:].rstrip(b" \n"):
                return
            prefix += got
        raise RunError(
            f"{self.path}: leaf {name!r} at byte {start} has the header {bytes(prefix[:200]).rstrip()!r}, "
            f"expected {expected.rstrip()!r}; the file is damaged or belongs to another {TREE}"
        )


class _PlainUnpickler(pickle.Unpickler):
    """Builtin containers, strings and numbers; whatever needs an import is refused before it is looked up."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a checkpoint needs no class or function")


def _refuse_opcodes(pickled: bytes) -> None:
    for opcode, _, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
            return  # the unpickler comes no further, and can say what is asked for
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}, and a checkpoint's tree never does")


def _is_layout(value) -> bool:
    return type(value) is dict and all(
        type(name) is str
        and type(entry) is tuple
        and [type(part) for part in entry] == [str, tuple]
        and len(entry[1]) <= 64  # numpy's own bound
        and all(type(size) is int and 0 <= size < 2**63 for size in entry[1])
        for name, entry in value.items()
    )


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Exactly what np.save puts before the array's bytes."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize
