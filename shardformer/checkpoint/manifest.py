"""`manifest.json`: every leaf of a checkpoint, its pieces in the array files, and all checksums.

A manifest is checked before it is used: its pieces fill their files and their leaves, without gaps or overlaps.
"""

import dataclasses
import json
import math
import re
import zlib

import jax
import numpy as np

from shardformer.checkpoint import checksums
from shardformer.checkpoint.store import MANIFEST, Damaged, Location
from shardformer.checkpoint.stores import read_small_file
from shardformer.errors import RunError

FORMAT = 2
MAX_BYTES = 64 * 2**20

Index = tuple[tuple[int, int], ...]  # of a slice of a leaf: (start, stop) along each axis

_ARRAYS = re.compile(r"arrays(-\d{5}-of-\d{5})?\.npy")
_DOCUMENT = re.compile(r"[A-Za-z0-9_]+\.(json|pkl)")
_SUBFOLDER = re.compile(r"([0-9a-f]+-parts-of-[1-9]\d{0,17})?")
_MAX_AXES = 64  # numpy's limit


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
    """The layout of one leaf, and its pieces."""

    dtype: str  # np.save writes bfloat16 as '|V2'
    shape: tuple[int, ...]
    spec: list | None  # the PartitionSpec at the time of saving, for information
    key: str | None  # the generator's name if the leaf is a PRNG key, which is stored as its data
    pieces: tuple[Piece, ...]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    leaves: dict[str, Leaf]
    files: dict[str, dict[str, int]]  # name -> its "bytes" and, except for array files, its "crc32"
    subfolder: str = ""  # of the checkpoint's folder with the files

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the content of tree.pkl: leaf name -> (dtype name, global shape)."""
        return {name: (leaf.dtype, leaf.shape) for name, leaf in self.leaves.items()}

    def array_files(self) -> dict[str, int]:
        """Returns name -> bytes."""
        return {name: entry["bytes"] for name, entry in self.files.items() if _ARRAYS.fullmatch(name)}

    def to_text(self) -> str:
        content = {"format": FORMAT} | dataclasses.asdict(self)
        return _sign({name: value for name, value in content.items() if name != "subfolder" or value})


def read_manifest(folder: Location) -> Manifest:
    """Reads and checks a checkpoint's manifest; raises Damaged, or RunError for another format."""
    path = folder / MANIFEST
    text = read_small_file(path, MAX_BYTES)
    try:
        content = json.loads(text)
        if _sign(content | {"crc32": None}).encode() != text:  # every format has this checksum
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
    """Returns the content as text, with the checksum of the text whose checksum is null."""
    checksum = zlib.crc32(_to_json(content, None).encode())
    return _to_json(content, checksum)


def _to_json(content: dict, checksum: int | None) -> str:
    return json.dumps(content | {"crc32": checksum}) + "\n"


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
    pieces: list[Piece] = []
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
        values = (piece.offset, piece.bytes, *(edge for pair in piece.index for edge in pair))
        _require(
            all(map(_is_size, values)) and type(piece.file) is str, f"a piece of {here} has an impossible position"
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
    shape = tuple(max(size, 1) for size in leaf.shape)  # numpy multiplies these even if the array is empty
    _require(leaf.nbytes(shape) < 2**63, f"{here} has an impossible shape")


def _is_grid(boxes: list[Index], shape: tuple[int, ...]) -> bool:
    """Returns whether the boxes are all products of one partition of each axis into spans."""
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
    """Returns whether the value has for each axis None, the name of a mesh axis, or a list of names."""
    return type(value) is list and all(map(_is_spec_of_axis, value))


def _is_spec_of_axis(value) -> bool:
    names = value if type(value) is list else [value]
    return value is None or all(type(name) is str for name in names)


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


def flatten(tree) -> dict:
    """Returns name -> leaf, in the order of the tree."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves are named {name!r}: rename a key that holds a '/' or differs only in type")
        named[name] = leaf
    return named


def unflatten(like, named: dict):
    """Returns a tree with the structure of `like` and the leaves of `named`."""
    wanted = flatten(like)
    if wanted.keys() != named.keys():
        raise ValueError(f"only one side has {sorted(wanted.keys() ^ named.keys())}")
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in wanted])
