"""The seed notebook's container: np.save records of a tree's leaves in `arrays.npy`, the tree itself in `tree.pkl`.

`write_checkpoint(target, read_checkpoint(source))` gives the same bytes. Every leaf leads with an axis of shards.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from shardformer.convert import seed_pickles
from shardformer.convert.shard_files import BFLOAT16, ON_DISK
from shardformer.errors import RunError, UsageError, describe_error

ARRAYS, TREE = "arrays.npy", "tree.pkl"


# Arithmetic of the notebook that no native run computes, by the ending of the parameters' names.
NOT_EXPRESSIBLE = {
    "/~/linear_3/w": "x + attention + feed-forward is summed over the shards, so that the residual stream counts once "
    "per shard in every layer, and the trunk adds it once more",
    "/~/layer_norm/scale": "each shard has its own norm, and they differ; a native model has one norm for all shards",
    "/~/linear_5/b": "it is added on every shard before their sum, and every share learns from the whole gradient",
}


def is_seed_folder(path: Path) -> bool:
    """Returns whether a folder is the seed's; our checkpoints have the same two files next to a manifest."""
    return (path / ARRAYS).is_file() and (path / TREE).is_file() and not (path / "manifest.json").exists()


def read_checkpoint(folder: Path):
    """Returns the tree with numpy arrays as leaves; runs nothing in it, and makes only the containers of such trees."""
    folder = Path(folder)
    leaves, structure = _flat_tree(folder / TREE)
    arrays = list(_records(folder / ARRAYS))
    if len(arrays) != len(leaves):
        raise RunError(f"{folder / ARRAYS} has {len(arrays)} arrays, and {TREE} {len(leaves)} leaves: copy it again")
    return structure.unflatten(arrays)


def write_checkpoint(folder: Path, tree, protocol: int = 4) -> None:
    """Writes a tree as the notebook's `save` does, with the classes that were read, or Haiku's and optax's own.

    `protocol` is the pickle's: Python 3.8 to 3.13 write 4, later ones 5.
    """
    if protocol not in (4, 5):
        raise ValueError(f"pickles of protocol {protocol} can be read, but not written; take 4")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ARRAYS, "wb") as file:
        for leaf in map(np.asarray, jax.tree.leaves(tree)):
            np.save(file, leaf.view(ON_DISK) if leaf.dtype == BFLOAT16 else leaf, allow_pickle=False)
    (folder / TREE).write_bytes(seed_pickles.dumps(jax.tree.map(lambda _: 0, tree), protocol))


def refuse_to_convert(folder: Path) -> NoReturn:
    """Raises an error that names the seed's arithmetic which a native run cannot express."""
    leaves, structure = _flat_tree(folder / TREE)
    named = jax.tree_util.tree_leaves_with_path(structure.unflatten(leaves))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
    reasons = []
    for ending, why in NOT_EXPRESSIBLE.items():
        matching = [name for name in names if name.startswith("params/") and name.endswith(ending)]
        if matching:
            reasons.append(f"{matching[0]}{f' and {len(matching) - 1} more' if matching[1:] else ''}: {why}")
    if not reasons:
        raise UsageError(f"{folder} has the two files of the seed's notebook, and none of its parameters")
    raise UsageError(
        f"{folder} is a checkpoint of the seed's notebook, whose arithmetic no native run has. {'; '.join(reasons)}. "
        "Continue it under shardformer.legacy, with the state that shardformer.convert.seed.read_checkpoint returns"
    )


def _flat_tree(path: Path):
    pickled = _pickled(path)
    try:
        return jax.tree.flatten(seed_pickles.loads(pickled))
    except Exception as error:
        raise RunError(f"{path} cannot be read: {describe_error(error)}") from None


def _pickled(path: Path) -> bytes:
    with _open(path) as file:
        content = file.read(seed_pickles.MAX_BYTES + 1)
    if content[:1] != b"\x80":
        raise RunError(f"{path} is not a pickle: it begins with {content[:10]!r}")
    return content


def _records(path: Path) -> Iterator[np.ndarray]:
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        while (start := file.tell()) < size:
            try:
                yield _record(file, size)
            except Exception as error:  # numpy parses headers as Python
                raise RunError(f"{path} is damaged at byte {start}: {error!s:.200}") from None


def _record(file, size: int) -> np.ndarray:
    if (version := np.lib.format.read_magic(file)) != (1, 0):
        raise ValueError(f"it has version {version} of the npy format, expected (1, 0)")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    nbytes, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if dtype.hasobject or nbytes > left:
        raise ValueError(f"{dtype}{list(shape)} takes {nbytes} bytes, and {left} are left")
    array = np.frombuffer(file.read(nbytes), dtype).reshape(shape, order="F" if fortran_order else "C")
    return array.view(BFLOAT16) if dtype == ON_DISK else array


def _open(path: Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
