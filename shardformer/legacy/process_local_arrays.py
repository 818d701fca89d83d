"""Several processes: as under pmap, legacy code passes its process's part of every array and gets its part back."""

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardformer.legacy.axis_resources import Placements
from shardformer.legacy.axis_specs import AxisSpec


def takes_local_shards(mesh: Mesh | None, args) -> bool:
    """Whether these arguments are parts; code of the days of jax.Array passes arrays that span the processes.

    What jit, a gradient or an xmap around traces is whole.
    """
    leaves = jax.tree.leaves(args)
    if mesh is None or not mesh.is_multi_process or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    return all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def hint(mesh: Mesh | None) -> str:
    """Where a size may be that of a part: under jit, in a gradient and in another xmap all arrays are whole."""
    spans = mesh is not None and mesh.is_multi_process
    return " (only a plain call takes this process's part; otherwise arrays span the processes)" if spans else ""


def to_global(args, axes: list[AxisSpec], placements: Placements):
    """Every process's part of each argument, as one array over the mesh."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(
        tree,
        [
            multihost_utils.host_local_array_to_global_array(leaf, placements.mesh, placements.sharding(of).spec)
            for leaf, of in zip(leaves, axes, strict=True)
        ],
    )


def to_local(result):
    """This process's part of each array that an xmap over the mesh returned."""
    return jax.tree.map(
        lambda x: multihost_utils.global_array_to_host_local_array(x, x.sharding.mesh, x.sharding.spec), result
    )
