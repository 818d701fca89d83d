"""Multiple processes: as under pmap, legacy code passes the local part of every array and gets its local part back."""

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardformer.legacy.axis_resources import Placements
from shardformer.legacy.axis_specs import AxisSpec


def spans_processes(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.is_multi_process


def needs_local_shards(mesh: Mesh | None, args) -> bool:
    """Returns True if the arguments are this process's parts: neither arrays that span processes nor tracers."""
    if not spans_processes(mesh):
        return False
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    return all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def hint(mesh: Mesh | None) -> str:
    """For a message about a size, which may be that of a local part."""
    return (
        " (a plain call takes this process's part; under jit, grad or another xmap, arrays span the processes)"
        if spans_processes(mesh)
        else ""
    )


def to_global(args, axes: list[AxisSpec], placements: Placements):
    """The local parts of all processes, as one array over the mesh for each argument."""
    assert placements.mesh is not None, "only a mesh spans processes"
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(
        tree,
        [
            multihost_utils.host_local_array_to_global_array(leaf, placements.mesh, placements.sharding(of).spec)
            for leaf, of in zip(leaves, axes, strict=True)
        ],
    )


def to_local(result):
    """The local part of each array that an xmap over the mesh returned."""
    return jax.tree.map(
        lambda x: multihost_utils.global_array_to_host_local_array(x, x.sharding.mesh, x.sharding.spec), result
    )
