"""Restores a checkpoint onto the devices of any mesh; each process reads only its devices' slices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from shardformer.checkpoint import array_files, documents, manifest
from shardformer.checkpoint.manifest import Index, Leaf, Manifest
from shardformer.checkpoint.snapshot import index_bounds, is_key
from shardformer.checkpoint.store import MANIFEST, Location
from shardformer.errors import RunError


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of a checkpoint, which is read onto the devices of its sharding when it is needed."""

    name: str
    shape: tuple[int, ...]
    _reader: array_files.Reader
    _leaf: Leaf
    _like: jax.ShapeDtypeStruct

    @property
    def splits_rows(self) -> bool:
        """True if the sharding splits the first axis."""
        return bool(self.shape) and self._like.sharding.shard_shape(self.shape)[0] != self.shape[0]

    def read(self) -> jax.Array:
        """Returns the complete array."""
        return _read_onto_devices(self._reader, self.name, self._leaf, self._like, self.shape)

    def read_rows(self, first: int, count: int) -> jax.Array:
        """Returns rows of the first axis, which the sharding must not split."""
        return _read_onto_devices(
            self._reader, self.name, self._leaf, self._like, (count, *self.shape[1:]), first_row=first
        )


def keep_as_read(name: str, leaf: StoredLeaf) -> Any:
    """Returns the array itself."""
    return leaf.read()


def restore(
    folder: Location, like, ignored: tuple[str, ...] = (), change: Callable[[str, StoredLeaf], Any] = keep_as_read
):
    """Returns the checkpoint as the tree `like` of jax.ShapeDtypeStructs, each leaf split by its `.sharding`.

    `ignored` names parts of the saved state that `like` may lack, leaves or folders: a sampler ignores the optimizer.
    `change(name, leaf)` reads each leaf before the next, and may return other values, for example quantised ones.
    """
    stored = manifest.read_manifest(folder)
    wanted = manifest.flatten(like)
    _check_layout(folder, stored, wanted, ignored)
    with array_files.Reader(folder, stored) as reader:
        leaves = {
            name: change(name, StoredLeaf(name, stored.leaves[name].shape, reader, stored.leaves[name], leaf))
            for name, leaf in wanted.items()
        }
    return manifest.unflatten(like, leaves)


def _read_onto_devices(
    reader: array_files.Reader,
    name: str,
    stored: Leaf,
    like: jax.ShapeDtypeStruct,
    shape: tuple[int, ...],
    first_row: int = 0,
) -> jax.Array:
    """Returns an array of this shape: the leaf, or rows of it from `first_row` on."""
    places = like.sharding.addressable_devices_indices_map(shape)
    places = {device: _move_rows(index_bounds(index, shape), first_row) for device, index in places.items()}
    slices = reader.read_slices(name, set(places.values()))
    shards, used = [], set()
    for device, index in places.items():
        part = slices[index]
        if index in used:  # devices must not share memory: on the CPU the Array keeps it, and a step may reuse it
            (part,) = array_files.allocate_aligned([part.shape], part.dtype)
            part[...] = slices[index]
        used.add(index)
        shards.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind)))
    array = jax.make_array_from_single_device_arrays(shape, like.sharding, shards)
    array.block_until_ready()  # frees the host's copy before the next leaf is read
    return jax.random.wrap_key_data(array, impl=stored.key) if stored.key else array


def _move_rows(bounds: Index, first: int) -> Index:
    return ((bounds[0][0] + first, bounds[0][1] + first), *bounds[1:]) if first else bounds


def _check_layout(
    folder: Location, stored: Manifest, wanted: dict[str, jax.ShapeDtypeStruct], ignored: tuple[str, ...]
) -> None:
    """Raises RunError unless the saved leaves are the wanted ones, by name, dtype and shape, or ignored."""
    folders = tuple(f"{part}/" for part in ignored)
    problems = [f"leaf {name!r} is missing" for name in wanted if name not in stored.leaves]
    for name, leaf in stored.leaves.items():
        if name in wanted:
            got, expected = (leaf.dtype, leaf.shape, bool(leaf.key)), _layout(wanted[name])
            if got != expected:
                problems.append(f"leaf {name!r} is {_describe(*got)}, expected {_describe(*expected)}")
        elif not f"{name}/".startswith(folders):
            problems.append(f"leaf {name!r} was not expected")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RunError(
            f"{folder / MANIFEST} does not fit this configuration: {'; '.join(problems[:3])}{more}; "
            "restore a checkpoint with the config.json beside it, and with the optimizer=FILE.py:NAME of its run if it "
            "has one"
        )


def _layout(like: jax.ShapeDtypeStruct) -> tuple[str, tuple[int, ...], bool]:
    key = is_key(like.dtype)
    data = jax.eval_shape(jax.random.key_data, like) if key else like
    return np.dtype(data.dtype).name, tuple(data.shape), key


def _describe(dtype: str, shape: tuple[int, ...], key: bool) -> str:
    return f"{'the PRNG key ' if key else ''}{dtype}[{','.join(map(str, shape))[:200]}]"


def verify(folder: Location) -> None:
    """Reads and checks every byte of a checkpoint; raises the errors of a full restore."""
    stored = manifest.read_manifest(folder)
    documents.check_documents(folder, stored)
    with array_files.Reader(folder, stored) as reader:
        for name, leaf in stored.leaves.items():
            reader.read_slices(name, {piece.index for piece in leaf.pieces})
