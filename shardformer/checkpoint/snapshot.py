"""A copy in host memory of what this process owns of a state: the one part of a save that training waits for."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardformer.checkpoint import leaf_names
from shardformer.checkpoint.manifest import Index, Leaf


@dataclasses.dataclass(frozen=True)
class Snapshot:
    leaves: dict[str, Leaf]  # all of the state's, without pieces
    owned: dict[str, list[tuple[Index, np.ndarray]]]

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        return ((name, index, array) for name, parts in self.owned.items() for index, array in parts)


def take(state) -> Snapshot:
    """Of every leaf the slices that this process owns: all processes together own each slice once."""
    leaves, owned, owners = {}, {}, _Owners()
    for name, leaf in leaf_names.flatten(state).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"leaf {name!r} is no jax.Array: {leaf!r}")
        key = is_key(leaf.dtype) and str(jax.random.key_impl(leaf))
        data = jax.random.key_data(leaf) if key else leaf
        spec = list(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else None
        leaves[name] = Leaf(np.dtype(data.dtype).name, tuple(data.shape), spec, key or None, ())
        owner = owners.of(data)
        slices = ((bounds(shard.index, data.shape), shard) for shard in data.addressable_shards)
        owned[name] = [(index, _twin(shard.data)) for index, shard in slices if shard.replica_id == owner[index]]
    for _, data in itertools.chain(*owned.values()):
        data.copy_to_host_async()
    return Snapshot(leaves, {name: [(index, _copy(data)) for index, data in parts] for name, parts in owned.items()})


class _Owners:
    """Which copy of a slice is written: of several, the one whose like have the least to write so far.

    Every process comes to the same answer, for it looks at where the whole array lies.
    """

    def __init__(self):
        self._bytes = collections.Counter()

    def of(self, data: jax.Array) -> dict[Index, int]:
        copies = collections.Counter(
            bounds(index, data.shape) for index in data.sharding.devices_indices_map(data.shape).values()
        )
        owner = {}
        for index, count in copies.items():
            owner[index] = min(range(count), key=self._bytes.__getitem__)
            self._bytes[owner[index]] += data.nbytes // len(copies)
        return owner


def is_key(dtype) -> bool:
    """Whether it is that of PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Slices as plain numbers."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))


def _twin(data: jax.Array) -> jax.Array:
    """An Array keeps the host copy made of it for all its life: a passing twin keeps this one."""
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def _copy(data: jax.Array) -> np.ndarray:
    """Host memory of its own: on the CPU numpy would see the buffer that the next step is given to write into."""
    host = np.asarray(data)
    return np.array(host, order="C") if next(iter(data.devices())).platform == "cpu" else host
