"""The small files beside the arrays: `tree.pkl`, the first form's table of leaves, and the caller's own documents."""

import pickle
import zlib
from pathlib import Path

from shardformer.checkpoint import manifest, safe_pickle
from shardformer.checkpoint.damage import Damaged, read_small_file
from shardformer.checkpoint.manifest import Leaf, Manifest

TREE = "tree.pkl"
PICKLE_PROTOCOL = 4  # fixed, so that a newer Python writes what an older one reads
MAX_BYTES = 64 * 2**20
_MAX_BYTES = {TREE: safe_pickle.MAX_BYTES, manifest.NAME: manifest.MAX_BYTES}  # of our own files
_IF_MISSING = "it is not a checkpoint, or an incomplete one"


def write_documents(folder: Path, leaves: dict[str, Leaf], arrays: dict[str, int], texts: dict[str, str]) -> None:
    """Writes all files of a checkpoint except its arrays, whose names and sizes are `arrays`; the manifest is last."""
    contents = {TREE: pickle.dumps(Manifest(leaves, {}).layout(), protocol=PICKLE_PROTOCOL)}
    contents |= {name: text.encode() for name, text in texts.items()}
    files = {name: {"bytes": nbytes} for name, nbytes in arrays.items()}
    files |= {name: _size_and_checksum(content) for name, content in contents.items()}
    contents[manifest.NAME] = Manifest(leaves, files).to_text().encode()
    for name, content in contents.items():
        limit = _MAX_BYTES.get(name, MAX_BYTES)
        if len(content) > limit:  # a reader would take it for damaged
            raise OSError(f"its {name} would have {len(content)} bytes, more than the limit of {limit}")
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def read_document(folder: Path, name: str) -> str:
    """The text of one of the caller's files."""
    path = Path(folder) / name
    content = read_small_file(path, MAX_BYTES, _IF_MISSING)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    _check(path, content, manifest.read_manifest(folder))
    return text


def check_documents(folder: Path, stored: Manifest) -> None:
    check_tree(folder, stored)
    for name in stored.files.keys() - stored.array_files().keys() - {TREE}:
        read_document(folder, name)


def check_tree(folder: Path, stored: Manifest) -> None:
    """tree.pkl, read without running anything in it, must say the same as the manifest."""
    path = folder / TREE
    pickled = read_small_file(path, safe_pickle.MAX_BYTES, _IF_MISSING)
    try:
        layout = safe_pickle.loads(pickled)
    except Exception as error:
        raise Damaged(f"{path} cannot be read: {safe_pickle.describe_error(error)}") from None
    if layout != stored.layout():
        raise Damaged(f"{path} is damaged: expected the names, dtypes and shapes of {manifest.NAME}")
    _check(path, pickled, stored)


def _size_and_checksum(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _check(path: Path, content: bytes, stored: Manifest) -> None:
    got, expected = _size_and_checksum(content), stored.files.get(path.name)
    if got != expected:
        raise Damaged(f"{path} is damaged: it has {got}, and {manifest.NAME} expects {expected}")
