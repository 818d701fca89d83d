"""pmap's description of an array over devices: `pxla.ShardingSpec` and the functions that take it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "split 0"  # the mesh axis of a PmapSharding
_pmaps: set[tuple[str, tuple[jax.Device, ...] | None, str | None]] = set()  # axis, devices and backend of all so far


@dataclasses.dataclass(frozen=True)
class NoSharding:
    """A position that is not split."""


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A position that is split into chunks, over as many mesh axes as there are numbers."""

    chunks: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Unstacked:
    """A position of which every device has one index, and which its buffer lacks."""

    size: int


@dataclasses.dataclass(frozen=True)
class ShardedAxis:
    """A mesh axis over which the split with this number, counted over all positions, lies."""

    axis: int


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A mesh axis over which the array is repeated."""

    replicas: int


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """The split of each position of an array, and the use of each mesh axis."""

    sharding: Sequence[NoSharding | Chunked | Unstacked]
    mesh_mapping: Sequence[ShardedAxis | Replicated]

    def __post_init__(self):
        for name in ("sharding", "mesh_mapping"):  # any iterable was accepted
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        sizes = [size for split in self._splits() for size in split]
        return tuple(sizes[m.axis] if isinstance(m, ShardedAxis) else m.replicas for m in self.mesh_mapping)

    def indices(self, shape: Sequence[int]) -> np.ndarray:
        """Returns an array over the mesh, of the index of each device's part of an array of `shape`."""
        pieces = [_pieces(split, size) for split, size in zip(self.sharding, shape, strict=True)]
        parts = np.empty(math.prod(map(len, pieces)), dtype=object)
        for number, index in enumerate(itertools.product(*pieces)):
            parts[number] = index
        over_splits = parts.reshape([size for split in self._splits() for size in split])
        over_mesh = over_splits.transpose([m.axis for m in self.mesh_mapping if isinstance(m, ShardedAxis)])
        copied = [axis for axis, m in enumerate(self.mesh_mapping) if isinstance(m, Replicated)]
        return np.broadcast_to(np.expand_dims(over_mesh, tuple(copied)), self.mesh_shape)

    def sharding_proto(self) -> Any:
        """Returns XLA's description of the same layout."""
        from jaxlib.xla_client import HloSharding, OpSharding  # which may go: nothing else here needs them

        axes = {m.axis: axis for axis, m in enumerate(self.mesh_mapping) if isinstance(m, ShardedAxis)}
        copied = [axis for axis in range(len(self.mesh_mapping)) if axis not in axes.values()]
        if not axes:
            return HloSharding.replicate()
        copies = [math.prod(self.mesh_shape[axis] for axis in copied)] if copied else []
        return HloSharding.iota_tile(
            dims=[*map(math.prod, self._splits()), *copies],
            reshape_dims=self.mesh_shape,
            transpose_perm=[axes[number] for number in range(len(axes))] + copied,
            subgroup_types=[OpSharding.Type.REPLICATED] * len(copies),
        )

    def _splits(self) -> list[tuple[int, ...]]:
        """The numbers of parts of each position."""
        parts = {Chunked: lambda s: s.chunks, Unstacked: lambda s: (s.size,), NoSharding: lambda s: ()}
        return [tuple(parts[type(split)](split)) for split in self.sharding]

    def named_sharding(self, devices: Sequence[jax.Device]) -> NamedSharding:
        splits = self._splits()
        shape = self.mesh_shape
        names = [
            f"split {m.axis}" if isinstance(m, ShardedAxis) else f"copy {i}" for i, m in enumerate(self.mesh_mapping)
        ]
        numbers = itertools.count()
        spec = [tuple(f"split {next(numbers)}" for _ in split) or None for split in splits]
        return NamedSharding(Mesh(np.array(devices).reshape(shape), names), PartitionSpec(*spec))


def _pieces(split: NoSharding | Chunked | Unstacked, size: int) -> Sequence[slice | int]:
    """Returns the indices of the parts of one position."""
    if isinstance(split, Unstacked):
        if split.size != size:
            raise ValueError(f"a ShardingSpec has {split} for a position of size {size}; give Unstacked({size})")
        return range(size)
    count = math.prod(split.chunks) if isinstance(split, Chunked) else 1
    length, rest = divmod(size, count)
    if rest:
        raise ValueError(f"a ShardingSpec has {split} for a position of size {size}; give chunks that divide it")
    return [slice(length * part, length * (part + 1)) for part in range(count)] if count > 1 else [slice(None)]


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple:
    """Returns the index of each device's part of an array, in the order of the mesh."""
    return tuple(spec.indices(shape).flat)


sharding_spec_sharding_proto = ShardingSpec.sharding_proto


def shard_args(devices: Sequence[jax.Device], indices: Sequence, shardings: Sequence, args: Sequence) -> list[list]:
    """Returns each argument as a list of its parts, of which each is on its device. The indices tell the parts."""
    return [
        [jax.device_put(arg[index], device) for index, device in zip(parts, devices, strict=True)]
        for parts, arg in zip(indices, args, strict=True)
    ]


def note_pmap(axis: str, devices: Sequence[jax.Device] | None, backend: str | None) -> None:
    """Notes that layouts over `axis` may be those of a pmap from now on; it takes the first of the devices."""
    _pmaps.add((axis, None if devices is None else tuple(devices), backend))


def is_of_a_pmap(sharding: Any) -> bool:
    """Returns True for a layout on the mesh of a pmap or a PmapSharding: it has their one axis and their devices."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, Mesh) or len(mesh.axis_names) != 1:
        return False
    (axis,), devices = mesh.axis_names, set(mesh.devices.flat)
    return axis == AXIS or any(
        devices == set((jax.devices(backend) if chosen is None else chosen)[: len(devices)])
        for name, chosen, backend in _pmaps
        if name == axis
    )


class _PmapShardingType(type):
    def __instancecheck__(cls, value) -> bool:
        """Returns True for the layout that a pmap gives its results, one index for each device."""
        return is_of_a_pmap(value) and any(value.spec)


class PmapSharding(metaclass=_PmapShardingType):
    """Makes the NamedSharding that equals pmap's description, which has no type today."""

    def __new__(cls, devices, sharding_spec: ShardingSpec):  # type: ignore[misc]  # a constructor of another type
        return sharding_spec.named_sharding(list(np.ravel(devices)))

    @staticmethod
    def default(shape: Sequence[int], sharded_dim: int | None = 0, devices: Sequence[jax.Device] | None = None):
        """The layout of one index of a position on each device; replicated if `sharded_dim` is None."""
        chosen = list(jax.local_devices() if devices is None else devices)
        if sharded_dim is None:
            return NamedSharding(Mesh(np.array(chosen), ("copy",)), PartitionSpec())
        if shape[sharded_dim] != len(chosen) and devices is not None:
            raise ValueError(
                f"PmapSharding.default got the shape {tuple(shape)} and {len(chosen)} devices for its position "
                f"{sharded_dim}; give one device for each index"
            )
        mesh = Mesh(np.array(chosen[: shape[sharded_dim]]), (AXIS,))
        return NamedSharding(mesh, PartitionSpec(*[None] * sharded_dim, AXIS))


def make_sharded_device_array(aval, sharding_spec: ShardingSpec | None, device_buffers: Sequence, indices=None):
    """The array that `device_buffers` are the parts of; without a spec, each is one index of the first position."""
    if sharding_spec is None:
        sharding_spec = ShardingSpec(
            [Unstacked(aval.shape[0]), *[NoSharding()] * (len(aval.shape) - 1)], [ShardedAxis(0)]
        )
    sharding = sharding_spec.named_sharding([_device(buffer) for buffer in device_buffers])
    shape = sharding.shard_shape(tuple(aval.shape))
    if any(math.prod(shape) != np.size(buffer) for buffer in device_buffers):
        raise ValueError(
            f"make_sharded_device_array got buffers of the shapes {[np.shape(buffer) for buffer in device_buffers]}; "
            f"each device of {sharding_spec} has {shape} of the array {tuple(aval.shape)}"
        )
    return jax.make_array_from_single_device_arrays(
        tuple(aval.shape), sharding, [buffer.reshape(shape) for buffer in device_buffers]
    )


def _device(buffer: jax.Array) -> jax.Device:
    (device,) = buffer.devices()
    return device
