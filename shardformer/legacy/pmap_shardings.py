"""pmap's description of an array over devices: `pxla.ShardingSpec` and `pxla.make_sharded_device_array`."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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

    def _splits(self) -> list[tuple[int, ...]]:
        """The numbers of parts of each position."""
        parts = {Chunked: lambda s: s.chunks, Unstacked: lambda s: (s.size,), NoSharding: lambda s: ()}
        return [tuple(parts[type(split)](split)) for split in self.sharding]

    def named_sharding(self, devices: Sequence[jax.Device]) -> NamedSharding:
        splits = self._splits()
        sizes = [size for split in splits for size in split]
        shape = [sizes[m.axis] if isinstance(m, ShardedAxis) else m.replicas for m in self.mesh_mapping]
        names = [
            f"split {m.axis}" if isinstance(m, ShardedAxis) else f"copy {i}" for i, m in enumerate(self.mesh_mapping)
        ]
        numbers = iter(range(len(sizes)))
        spec = [tuple(f"split {next(numbers)}" for _ in split) or None for split in splits]
        return NamedSharding(Mesh(np.array(devices).reshape(shape), names), PartitionSpec(*spec))


class PmapSharding:
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
        mesh = Mesh(np.array(chosen[: shape[sharded_dim]]), ("split",))
        return NamedSharding(mesh, PartitionSpec(*[None] * sharded_dim, "split"))


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
