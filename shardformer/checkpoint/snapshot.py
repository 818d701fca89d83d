"""The snapshot of a state: this process's slices in host memory. Training waits for no other part of a save."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardformer.checkpoint import manifest
from shardformer.checkpoint.manifest import Index, Leaf


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The slices that this process saves."""

    leaves: dict[str, Leaf]  # all leaves of the state, without pieces
    owned: dict[str, list[tuple[Index, np.ndarray]]]

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        return ((name, index, array) for name, parts in self.owned.items() for index, array in parts)


def take_snapshot(state) -> Snapshot:
    """Copies the slices that this process saves; the processes together save each slice of each leaf once."""
    leaves, owned, owners = {}, {}, _OwnerChoice()
    for name, leaf in manifest.flatten(state).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"leaf {name!r} is not a jax.Array: {leaf!r:.200}")
        key = is_key(leaf.dtype) and str(jax.random.key_impl(leaf))
        data = jax.random.key_data(leaf) if key else leaf
        spec = list(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else None
        leaves[name] = Leaf(np.dtype(data.dtype).name, tuple(data.shape), spec, key or None, ())
        owner = owners.choose(data)
        slices = ((index_bounds(shard.index, data.shape), shard) for shard in data.addressable_shards)
        owned[name] = [(index, _second_array(s.data)) for index, s in slices if s.replica_id == owner[index]]
    for _, data in itertools.chain(*owned.values()):
        data.copy_to_host_async()
    return Snapshot(
        leaves, {name: [(index, _copy_to_host(data)) for index, data in parts] for name, parts in owned.items()}
    )


class _OwnerChoice:
    """The choice of the replica that saves a slice: the one with the fewest bytes so far.

    Every process makes the same choice, because each knows the global sharding.
    """

    def __init__(self):
        self._bytes = collections.Counter()

    def choose(self, data: jax.Array) -> dict[Index, int]:
        replicas = collections.Counter(
            index_bounds(index, data.shape) for index in data.sharding.devices_indices_map(data.shape).values()
        )
        owner = {}
        for index, count in replicas.items():
            owner[index] = min(range(count), key=self._bytes.__getitem__)
            self._bytes[owner[index]] += data.nbytes // len(replicas)
        return owner


def is_key(dtype) -> bool:
    """Returns whether a dtype is that of PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def index_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Returns the (start, stop) of each slice."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))


def _second_array(data: jax.Array) -> jax.Array:
    """Returns a short-lived alias: JAX frees the cached host copy with it."""
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def _copy_to_host(data: jax.Array) -> np.ndarray:
    """Copies to new host memory: numpy would see a buffer of a CPU, or of the host, that the next step may reuse."""
    host, device = np.asarray(data), next(iter(data.devices()))
    is_view = device.platform == "cpu" or data.sharding.memory_kind != device.default_memory().kind
    return np.array(host, order="C") if is_view else host
