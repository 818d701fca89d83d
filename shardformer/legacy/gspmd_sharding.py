"""`jax.sharding.GSPMDSharding`, also called OpShardingSharding: XLA's description of a layout, as a NamedSharding."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class GSPMDSharding:
    """Makes the NamedSharding that equals XLA's description, which no array has today."""

    def __new__(cls, devices: Sequence[jax.Device], op_sharding, *, memory_kind: str | None = None):  # type: ignore[misc]
        """op_sharding: jaxlib's OpSharding, or its HloSharding."""
        to_proto = getattr(op_sharding, "to_proto", lambda: op_sharding)
        description = to_proto()
        order, sizes = list(description.tile_assignment_devices), list(description.tile_assignment_dimensions)
        if not sizes:  # replicated, or the whole array on one device
            return cls.get_replicated(devices if len(devices) > 1 else [devices[0]], memory_kind=memory_kind)
        if description.iota_reshape_dims:
            iota = np.arange(len(devices)).reshape(description.iota_reshape_dims)
            order = list(iota.transpose(description.iota_transpose_perm).ravel())
        copies = len(description.last_tile_dims) or int(description.replicate_on_last_tile_dim)
        names = [f"axis {position}" for position in range(len(sizes))]
        mesh = Mesh(np.array(devices)[order].reshape(sizes), names)
        return NamedSharding(mesh, PartitionSpec(*names[: len(sizes) - copies]), memory_kind=memory_kind)

    @staticmethod
    def get_replicated(devices: Sequence[jax.Device], *, memory_kind: str | None = None) -> NamedSharding:
        return NamedSharding(Mesh(np.array(devices), ("copy",)), PartitionSpec(), memory_kind=memory_kind)
