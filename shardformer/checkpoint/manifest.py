"""`manifest.json`: every leaf of a checkpoint, its pieces in the array files, and all checksums.

What is read is checked before it is used: pieces fill their files and their leaves, without gaps or overlaps.
"""

import dataclasses
import json
import math
import re
import zlib

import numpy as np

from shardformer.checkpoint import checksums
from shardformer.checkpoint.reading import read_small_file
from shardformer.checkpoint.store import MANIFEST, Damaged, Place
from shardformer.errors import RunError

FORMAT = 2
MAX_BYTES = 64 * 2**20

Index = tuple[tuple[int, int], ...]  # of a slice of a leaf: (start, stop) along each axis

_ARRAYS = re.compile(r"arrays(-\d{5}-of-\d{5})?\.npy")
_DOCUMENT = re.compile(r"[A-Za-z0-9_]+\.(json|pkl)")
_SUBFOLDER = re.compile(r"([0-9a-f]+-parts-of-[1-9]\d{0,17})?")
_MAX_AXES = 64  # numpy's own limit


@dataclasses.dataclass(frozen=True)
class Piece:
    """One slice of a leaf: an np.save record in an array file."""

    file: str
    offset: int  # of the record: a header and the slice's bytes
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
    spec: list | None  # how it was split when it was saved: axis names, for information
    key: str | None  # of a PRNG key, which is stored as its data: the generator's name
    pieces: tuple[Piece, ...]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    leaves: dict[str, Leaf]
    files: dict[str, dict[str, int]]  # name -> its "bytes" and, except for array files, its "crc32"
    subfolder: str = ""  # of the checkpoint's folder that holds the files

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What tree.pkl holds: leaf name -> (dtype name, global shape)."""
        return {name: (leaf.dtype, leaf.shape) for name, leaf in self.leaves.items()}

    def array_files(self) -> dict[str, int]:
        """Name -> bytes."""
        return {name: entry["bytes"] for name, entry in self.files.items() if _ARRAYS.fullmatch(name)}

    def to_text(self) -> str:
        content = {"format": FORMAT} | dataclasses.asdict(self)
        return _sign({name: value for name, value in content.items() if name != "subfolder" or value})


def read_manifest(folder: Place) -> Manifest:
    path = folder / MANIFEST
    text = read_small_file(path, MAX_BYTES)
    try:
        content = json.loads(text)
        if _sign(content | {"crc32": None}).encode() != text:  # every format is signed in this way
            raise ValueError("its own checksum does not match")
        if content["format"] != FORMAT:
            raise RunError(
                f"{path} has format {content['format']!r:.40}, and this version of shardformer reads only {FORMAT}"
            )
        leaves = {name: _parse_leaf(leaf) for name, leaf in content["leaves"].items()}
        manifest = Manifest(leaves, _parse_files(content["files"]), content.get("subfolder", ""))
        _check_manifest(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
        raise Damaged(f"{path} is damaged: {type(error).__name__}: {error!s:.200}") from None
    return manifest


def _sign(content: dict) -> str:
    """The one text of this content, with the checksum that the text has without a checksum."""
    text = lambda checksum: json.dumps(content | {"crc32": checksum}) + "\n"
    return text(zlib.crc32(text(None).encode()))


def _parse_leaf(content: dict) -> Leaf:
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


def _parse_files(content: dict) -> dict[str, dict[str, int]]:
    for name, entry in content.items():
        keys = {"bytes"} if _ARRAYS.fullmatch(name) else {"bytes", "crc32"}
        _require(_ARRAYS.fullmatch(name) or _DOCUMENT.fullmatch(name), f"a checkpoint cannot have a file {name!r:.80}")
        _require(
            entry.keys() == keys and all(map(_is_size, entry.values())), f"file {name!r:.80} has no size or checksum"
        )
    return content


def _check_manifest(manifest: Manifest) -> None:
    _require(_SUBFOLDER.fullmatch(manifest.subfolder), f"it has the impossible subfolder {manifest.subfolder!r:.80}")
    ends = dict.fromkeys(manifest.array_files(), 0)
    pieces = []
    for name, leaf in manifest.leaves.items():
        _check_leaf(name, leaf)
        pieces += leaf.pieces
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        _require(ends.get(piece.file) == piece.offset, f"the pieces of {piece.file!r:.80} are not end to end")
        ends[piece.file] += piece.bytes
    for file, end in ends.items():
        _require(manifest.files[file]["bytes"] == end, f"the pieces of {file!r} do not fill it")


def _check_leaf(name: str, leaf: Leaf) -> None:
    here = f"leaf {name!r:.80}"
    _require(len(leaf.shape) <= _MAX_AXES and all(map(_is_size, leaf.shape)), f"{here} has an impossible shape")
    _require(type(leaf.dtype) is str and _is_dtype(leaf.dtype), f"{here} has the unknown dtype {leaf.dtype!r:.40}")
    _require(leaf.spec is None or _is_spec(leaf.spec), f"{here} has an impossible spec")
    _require(leaf.key is None or type(leaf.key) is str, f"{here} has an impossible key")
    for piece in leaf.pieces:
        numbers = (piece.offset, piece.bytes, *(edge for pair in piece.index for edge in pair))
        _require(
            all(map(_is_size, numbers)) and type(piece.file) is str, f"a piece of {here} has an impossible position"
        )
        _require(all(map(_is_checksum, piece.checksums)), f"a piece of {here} has impossible checksums")
        _require(
            len(piece.index) == len(leaf.shape)
            and all(start <= stop <= size for (start, stop), size in zip(piece.index, leaf.shape, strict=True)),
            f"a piece of {here} is outside of it",
        )
        nbytes = leaf.nbytes(piece.shape)
        _require(
            nbytes < piece.bytes and len(piece.checksums) == checksums.count_blocks(nbytes),
            f"a piece of {here} has a wrong size",
        )
    _require(
        _is_grid([piece.index for piece in leaf.pieces], leaf.shape),
        f"the pieces of {here} do not cover it exactly once",
    )
    numbers = tuple(max(size, 1) for size in leaf.shape)  # what numpy multiplies, of an empty array as well
    _require(leaf.nbytes(numbers) < 2**63, f"{here} has an impossible shape")


def _is_grid(boxes: list[Index], shape: tuple[int, ...]) -> bool:
    """Each axis is cut into spans end to end, and there is one box for each choice of a span of every axis."""
    axes = [sorted({box[axis] for box in boxes}) for axis in range(len(shape))]
    cut = all(
        [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), size]
        for spans, size in zip(axes, shape, strict=True)
    )
    return cut and len(set(boxes)) == len(boxes) == math.prod(map(len, axes))


def _require(holds, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_spec(value) -> bool:
    """For each axis None, the name of a mesh axis, or several."""
    names = lambda axes: axes if type(axes) is list else [] if axes is None else [axes]
    return type(value) is list and all(type(name) is str for axes in value for name in names(axes))


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
