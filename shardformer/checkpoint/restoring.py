"""A checkpoint's arrays back onto the devices of any mesh, each process reading what its own devices need."""

from pathlib import Path

import jax
import numpy as np

from shardformer.checkpoint import array_files, documents, leaf_names, manifest
from shardformer.checkpoint.manifest import Leaf, Manifest
from shardformer.checkpoint.snapshot import bounds, is_key
from shardformer.errors import RunError


def restore(folder: Path, like, without: tuple[str, ...] = ()):
    """The checkpoint as the tree `like` of jax.ShapeDtypeStructs, each leaf laid out by its `.sharding`.

    `without` names the parts of the state (its top level) that the caller can do without: a sampler, the optimizer.
    """
    folder = Path(folder)
    stored = manifest.read(folder)
    documents.check_tree(folder, stored)
    wanted = leaf_names.flatten(like)
    _compare(folder, stored, wanted, without)
    with array_files.Reader(folder, stored) as reader:
        leaves = {name: _on_devices(reader, name, stored.leaves[name], leaf) for name, leaf in wanted.items()}
    return leaf_names.unflatten(like, leaves)


def _on_devices(reader: array_files.Reader, name: str, stored: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    places = like.sharding.addressable_devices_indices_map(stored.shape)
    places = {device: bounds(index, stored.shape) for device, index in places.items()}
    parts = reader.read(name, set(places.values()))
    given = set()

    def own(index):
        """Each device gets memory of its own: on the CPU that memory is the Array's, and a step may write into it."""
        if index not in given:
            given.add(index)
            return parts[index]
        (copy,) = array_files.empty([parts[index].shape], parts[index].dtype)
        copy[...] = parts[index]
        return copy

    shards = [jax.device_put(own(index), device) for device, index in places.items()]
    array = jax.make_array_from_single_device_arrays(stored.shape, like.sharding, shards)
    array.block_until_ready()  # the host's copy may go before the next leaf comes
    return jax.random.wrap_key_data(array, impl=stored.key) if stored.key else array


def _compare(folder: Path, stored: Manifest, wanted: dict[str, jax.ShapeDtypeStruct], without: tuple[str, ...]) -> None:
    """Every leaf wanted is there, as wanted, and nothing else but what the caller can do without."""
    problems = [f"leaf {name!r} is missing" for name in wanted if name not in stored.leaves]
    for name, leaf in stored.leaves.items():
        if name in wanted:
            got, expected = (leaf.dtype, leaf.shape, bool(leaf.key)), _layout(wanted[name])
            if got != expected:
                problems.append(f"leaf {name!r} is {_words(*got)}, expected {_words(*expected)}")
        elif name.partition("/")[0] not in without:
            problems.append(f"leaf {name!r} was not expected")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RunError(
            f"{folder / manifest.NAME} does not fit this configuration: {'; '.join(problems[:3])}{more}; "
            "a checkpoint is restored with the config.json that lies in it"
        )


def _layout(like: jax.ShapeDtypeStruct) -> tuple[str, tuple[int, ...], bool]:
    key = is_key(like.dtype)
    data = jax.eval_shape(jax.random.key_data, like) if key else like
    return np.dtype(data.dtype).name, tuple(data.shape), key


def _words(dtype: str, shape: tuple[int, ...], key: bool) -> str:
    return f"{'the PRNG key ' if key else ''}{dtype}[{','.join(map(str, shape))[:200]}]"


def verify(folder: Path) -> None:
    """Reads every byte of a checkpoint; raises what a restore of all of it would."""
    folder = Path(folder)
    stored = manifest.read(folder)
    documents.check_all(folder, stored)
    with array_files.Reader(folder, stored) as reader:
        for name, leaf in stored.leaves.items():
            reader.read(name, {piece.index for piece in leaf.pieces})
