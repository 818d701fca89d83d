"""The small files beside the arrays: `tree.pkl`, the first form's table of leaves, and the caller's own documents."""

import pickle
import zlib
from pathlib import Path

from shardformer.checkpoint import manifest, safe_pickle
from shardformer.checkpoint.damage import Damaged, read_bytes
from shardformer.checkpoint.manifest import Manifest

TREE = "tree.pkl"
PICKLE_PROTOCOL = 4  # fixed, so that a newer Python writes what an older one reads
MOST_BYTES = 64 * 2**20
_MOST_BYTES = {TREE: safe_pickle.MOST_BYTES, manifest.NAME: manifest.MOST_BYTES}  # of those that are no caller's


def write(folder: Path, leaves: dict, arrays: dict[str, int], texts: dict[str, str]) -> None:
    """All of a checkpoint's files but its arrays, whose names and bytes are `arrays`; the manifest comes last."""
    contents = {TREE: pickle.dumps(Manifest(leaves, {}).layout(), protocol=PICKLE_PROTOCOL)}
    contents |= {name: text.encode() for name, text in texts.items()}
    files = {name: {"bytes": nbytes} for name, nbytes in arrays.items()}
    files |= {name: _entry(content) for name, content in contents.items()}
    contents[manifest.NAME] = manifest.text_of(Manifest(leaves, files)).encode()
    for name, content in contents.items():
        most = _MOST_BYTES.get(name, MOST_BYTES)
        if len(content) > most:  # or it would be damage to whoever reads it
            raise OSError(f"its {name} would have {len(content)} bytes, and {most} are the most that it can have")
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def document(checkpoint: Path, name: str) -> str:
    """The text of one of the caller's files."""
    checkpoint = Path(checkpoint)
    content = read_bytes(checkpoint / name, MOST_BYTES, "it is no checkpoint or an incomplete one")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{checkpoint / name} cannot be read: {error}") from None
    _check(checkpoint / name, content, manifest.read(checkpoint))
    return text


def check_all(folder: Path, stored: Manifest) -> None:
    check_tree(folder, stored)
    for name in stored.files.keys() - {TREE}:
        if "crc32" in stored.files[name]:
            document(folder, name)


def check_tree(folder: Path, stored: Manifest) -> None:
    """tree.pkl, opened without running anything in it, says the same as the manifest."""
    path = folder / TREE
    pickled = read_bytes(path, safe_pickle.MOST_BYTES, "it is no checkpoint or an incomplete one")
    try:
        layout = safe_pickle.loads(pickled)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise Damaged(f"{path} cannot be read: {error or type(error).__name__}") from None
    if layout != stored.layout():
        raise Damaged(f"{path} is damaged: expected the names, dtypes and shapes of {manifest.NAME}")
    _check(path, pickled, stored)


def _entry(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _check(path: Path, content: bytes, stored: Manifest) -> None:
    got, expected = _entry(content), stored.files.get(path.name)
    if got != expected:
        raise Damaged(f"{path} is damaged: it has {got}, and {manifest.NAME} expects {expected}")
