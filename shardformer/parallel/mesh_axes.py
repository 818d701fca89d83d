"""Axes of one device, which split nothing."""

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def drop_unit_axes(specs, mesh: Mesh):
    """Leaves axes of one device out of specs, so that nothing varies over them inside a shard_map."""

    def keep(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name and mesh.shape[name] > 1) or None

    return jax.tree.map(lambda spec: P(*map(keep, spec)), specs)
