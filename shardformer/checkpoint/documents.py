"""The small files next to the arrays: `tree.pkl` (names, dtypes and shapes), config.json and other documents."""

import pickle
import zlib
from pathlib import Path

from shardformer.checkpoint import manifest, safe_pickle
from shardformer.checkpoint.manifest import Leaf, Manifest
from shardformer.checkpoint.store import MANIFEST, Damaged, Location
from shardformer.checkpoint.stores import read_small_file
from shardformer.config import Config, is_hugging_face, parse_config
from shardformer.errors import UsageError, describe_error
from shardformer.storage import BucketPath, location, read_small

TREE = "tree.pkl"
PICKLE_PROTOCOL = 4  # fixed, so that older versions of Python can read it
MAX_BYTES = 64 * 2**20
_MAX_BYTES = {TREE: safe_pickle.MAX_BYTES, MANIFEST: manifest.MAX_BYTES}  # the limits of the other small files


def write_documents(
    folder: Location, leaves: dict[str, Leaf], arrays: dict[str, int], documents: dict[str, str], subfolder: str
) -> str:
    """Writes the small files of a checkpoint and returns its manifest; `arrays` maps array files to their bytes."""
    contents = {TREE: pickle.dumps(Manifest(leaves, {}).layout(), protocol=PICKLE_PROTOCOL)}
    contents |= {name: text.encode() for name, text in documents.items()}
    files = {name: {"bytes": nbytes} for name, nbytes in arrays.items()}
    files |= {name: _size_and_checksum(content) for name, content in contents.items()}
    text = Manifest(leaves, files, subfolder).to_text()
    for name, content in [*contents.items(), (MANIFEST, text)]:
        limit = _MAX_BYTES.get(name, MAX_BYTES)
        if len(content) > limit:  # a reader would report damage
            raise OSError(f"its {name} would have {len(content)} bytes, more than the limit of {limit}")
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return text


def read_document(folder: Location, name: str) -> str:
    """Returns the text of one of the caller's documents."""
    stored = manifest.read_manifest(folder)
    path = folder / stored.subfolder / name
    content = read_small_file(path, MAX_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    _check(path, content, stored)
    return text


def check_documents(folder: Location, stored: Manifest) -> None:
    """Reads and verifies every document."""
    for name in stored.files.keys() - stored.array_files().keys() - {TREE}:
        read_document(folder, name)


def check_tree(folder: Location, stored: Manifest) -> None:
    """Reads tree.pkl, without running any code in it, and compares it with the manifest."""
    path = folder / stored.subfolder / TREE
    pickled = read_small_file(path, safe_pickle.MAX_BYTES)
    try:
        layout = safe_pickle.loads(pickled)
    except Exception as error:
        raise Damaged(f"{path} cannot be read: {describe_error(error)}") from None
    if layout != stored.layout():
        raise Damaged(f"{path} is damaged: expected the names, dtypes and shapes of {MANIFEST}")
    _check(path, pickled, stored)


def _size_and_checksum(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _check(path: Location, content: bytes, stored: Manifest) -> None:
    got, expected = _size_and_checksum(content), stored.files.get(path.name)
    if got != expected:
        raise Damaged(f"{path} is damaged: it has {got}, and {MANIFEST} expects {expected}")


def describe_no_run(folder: Path | BucketPath) -> str:
    """Returns why a folder without config.json is no run."""
    reason = "it has no config.json" if folder.exists() else "the folder does not exist"
    return f"{folder} is not a run: {reason}"


def read_config(folder: Path | BucketPath) -> Config:
    """Returns the configuration of a run; rejects folders that hold another project's config.json."""
    path = location(folder) / "config.json"
    try:
        text = read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(describe_no_run(location(folder))) from None
    if kind := "a Hugging Face folder" if is_hugging_face(text) else "GPT-J's shards" if b'"n_heads"' in text else "":
        raise UsageError(f"{folder} is {kind}; make a run of it first: convert {folder} RUN")
    return parse_config(text, path)
