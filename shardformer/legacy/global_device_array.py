"""`jax.experimental.global_device_array`: what a GlobalDeviceArray was, every `jax.Array` is today."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Device = jax.Device
Index = tuple[slice, ...]
MeshAxes = PartitionSpec
Shape = tuple[int, ...]


class _EveryArray(type):
    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, jax.Array)


class GlobalDeviceArray(metaclass=_EveryArray):
    """Makes a `jax.Array` over a mesh from what each process has or computes of it."""

    def __new__(cls, global_shape: Sequence[int], global_mesh: Mesh, mesh_axes, device_buffers: Sequence[jax.Array]):
        sharding = _sharding(global_mesh, mesh_axes)
        return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, list(device_buffers))

    @classmethod
    def from_callback(cls, global_shape: Sequence[int], global_mesh: Mesh, mesh_axes, data_callback: Callable):
        """data_callback: gives the part of the array at an index, a tuple of slices."""
        return jax.make_array_from_callback(tuple(global_shape), _sharding(global_mesh, mesh_axes), data_callback)

    @classmethod
    def from_batched_callback(cls, global_shape: Sequence[int], global_mesh: Mesh, mesh_axes, data_callback: Callable):
        """data_callback: gives the parts at a list of indices, all at once."""
        shape, sharding = tuple(global_shape), _sharding(global_mesh, mesh_axes)
        places = list(sharding.addressable_devices_indices_map(shape).items())
        parts = data_callback([index for _, index in places])
        buffers = [jax.device_put(part, device) for part, (device, _) in zip(parts, places, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def _sharding(mesh: Mesh, mesh_axes) -> NamedSharding:
    spec = mesh_axes if isinstance(mesh_axes, PartitionSpec) else PartitionSpec(*mesh_axes)
    return NamedSharding(mesh, spec)
