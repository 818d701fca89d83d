"""`manifest.json`: every leaf of a checkpoint, the pieces of it that lie in the array files, and all checksums.

Nothing that is read is believed before it is checked: sizes fit the files, pieces fill their files and their leaves.
"""

import dataclasses
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np

from shardformer.checkpoint import checksums
from shardformer.checkpoint.damage import Damaged, read_bytes
from shardformer.errors import RunError

NAME = "manifest.json"
FORMAT = 2
MOST_BYTES = 64 * 2**20

Index = tuple[tuple[int, int], ...]  # of a slice of a leaf: (start, stop) along each axis

_ARRAYS = re.compile(r"arrays(-\d{5}-of-\d{5})?\.npy")
_DOCUMENT = re.compile(r"[A-Za-z0-9_]+\.(json|pkl)")
_MOST_AXES = 64  # numpy's own bound


@dataclasses.dataclass(frozen=True)
class Piece:
    """An np.save record: one slice of a leaf."""

    file: str
    offset: int  # of the record, which is a header and the slice's bytes
    bytes: int  # of the record
    index: Index
    checksums: tuple[int, ...]  # of the slice's bytes, block by block: see checksums.py

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.index)


@dataclasses.dataclass(frozen=True)
class Leaf:
    dtype: str  # np.save writes bfloat16 as '|V2'
    shape: tuple[int, ...]
    spec: list | None  # how the run that saved it had split it: axis names, for information
    key: str | None  # of a PRNG key, stored as its data: which generator it is for
    pieces: tuple[Piece, ...]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    leaves: dict[str, Leaf]
    files: dict[str, dict[str, int]]  # name -> its bytes and, of all but the array files, its crc32

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What tree.pkl holds: leaf name -> (dtype name, global shape)."""
        return {name: (leaf.dtype, leaf.shape) for name, leaf in self.leaves.items()}


def text_of(manifest: Manifest) -> str:
    return _signed({"format": FORMAT} | dataclasses.asdict(manifest))


def read(folder: Path) -> Manifest:
    path = Path(folder) / NAME
    text = read_bytes(path, MOST_BYTES, "it is no checkpoint of this version, or an incomplete one")
    try:
        content = json.loads(text)
        if _signed(content | {"crc32": None}).encode() != text:  # as every format is signed
            raise ValueError("its own checksum does not fit it")
        if content["format"] != FORMAT:
            raise RunError(f"{path} has format {content['format']!r:.40}, and this shardformer reads {FORMAT} alone")
        manifest = Manifest({name: _leaf(leaf) for name, leaf in content["leaves"].items()}, _files(content["files"]))
        _check(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
        raise Damaged(f"{path} is damaged: {type(error).__name__}: {error!s:.200}") from None
    return manifest


def _signed(content: dict) -> str:
    """Its text, which is the only one that it has, with the checksum of the text without a checksum."""
    text = lambda checksum: json.dumps(content | {"crc32": checksum}) + "\n"
    return text(zlib.crc32(text(None).encode()))


def _leaf(content: dict) -> Leaf:
    pieces = tuple(
        Piece(
            piece["file"],
            piece["offset"],
            piece["bytes"],
            tuple((start, stop) for start, stop in piece["index"]),
            tuple(piece["checksums"]),
        )
        for piece in content["pieces"]
    )
    return Leaf(content["dtype"], tuple(content["shape"]), content["spec"], content["key"], pieces)


def _files(content: dict) -> dict[str, dict[str, int]]:
    for name, entry in content.items():
        keys = {"bytes"} if _ARRAYS.fullmatch(name) else {"bytes", "crc32"}
        _need(_ARRAYS.fullmatch(name) or _DOCUMENT.fullmatch(name), f"a checkpoint has no file {name!r:.80}")
        _need(entry.keys() == keys and all(map(_is_size, entry.values())), f"file {name!r:.80} lacks a number")
    return content


def _check(manifest: Manifest) -> None:
    ends = dict.fromkeys(filter(_ARRAYS.fullmatch, manifest.files), 0)
    pieces = []
    for name, leaf in manifest.leaves.items():
        _check_leaf(name, leaf)
        pieces += leaf.pieces
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        _need(ends.get(piece.file) == piece.offset, f"the pieces of {piece.file!r:.80} do not lie end to end")
        ends[piece.file] += piece.bytes
    for file, end in ends.items():
        _need(manifest.files[file]["bytes"] == end, f"the pieces of {file!r} do not fill it")


def _check_leaf(name: str, leaf: Leaf) -> None:
    here = f"leaf {name!r:.80}"
    _need(len(leaf.shape) <= _MOST_AXES and all(map(_is_size, leaf.shape)), f"{here} has no shape")
    _need(type(leaf.dtype) is str and _is_dtype(leaf.dtype), f"{here} has the unknown dtype {leaf.dtype!r:.40}")
    _need(leaf.key is None or type(leaf.key) is str, f"{here} has no name of a generator")
    for piece in leaf.pieces:
        numbers = (piece.offset, piece.bytes, *(edge for pair in piece.index for edge in pair))
        _need(all(map(_is_size, numbers)) and type(piece.file) is str, f"a piece of {here} has no place")
        _need(all(map(_is_checksum, piece.checksums)), f"a piece of {here} has no checksums")
        _need(
            len(piece.index) == len(leaf.shape)
            and all(start <= stop <= size for (start, stop), size in zip(piece.index, leaf.shape, strict=True)),
            f"a piece of {here} lies outside it",
        )
        nbytes = leaf.nbytes(piece.shape)
        _need(
            nbytes < piece.bytes and len(piece.checksums) == checksums.count(nbytes), f"a piece of {here} has no bytes"
        )
    _need(_is_grid([piece.index for piece in leaf.pieces], leaf.shape), f"the pieces of {here} do not make it whole")


def _is_grid(boxes: list[Index], shape: tuple[int, ...]) -> bool:
    """Each axis is cut into spans that lie end to end, and there is one box for each choice of a span of every axis."""
    axes = [sorted({box[axis] for box in boxes}) for axis in range(len(shape))]
    cut = all(
        [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), size]
        for spans, size in zip(axes, shape, strict=True)
    )
    return cut and len(set(boxes)) == len(boxes) == math.prod(map(len, axes))


def _need(holds, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_size(value) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_checksum(value) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_dtype(name: str) -> bool:
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype.name == name and not dtype.hasobject
