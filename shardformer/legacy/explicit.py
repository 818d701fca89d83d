"""For what `vmap` refuses: `shard_map` over a mesh whose axes carry the logical names.

Groups of instances, a permutation of some of them only and one collective over two names work where every device has
one position of the axis, which is where they always worked. Everything else is a matter for vmap: see program.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


def one_to_one(placements, sizes: dict) -> tuple:
    """The named axes on the mesh, if each is one mesh axis of its own with one position on each device; else none."""
    if placements.mesh is None or any(placement.loops for _, placement in placements.of):
        return ()
    placed = tuple(name for name in sizes if placements[name].mesh_axes)
    used = [axis for name in placed for axis in placements[name].mesh_axes]
    fits = all(isinstance(name, str) and sizes[name] == placements.devices(name) for name in placed)
    return placed if fits and len(used) == len(set(used)) == len(placed) else ()


def over_devices(program, body, index_0: bool = False):
    """`body` on every device, for the axes that are one to one with the mesh; the others stay vmaps inside of it.

    Nothing shows here that a result is the same for all instances: one whose spec omits an axis is read at index 0.
    """
    names = one_to_one(program.placements, program.sizes)
    inner = program.over_axes(body, [name for name in program.sizes if name not in names], names, index_0)
    omitted = [tuple(name for name in names if name not in axes.names) for axes in program.outputs.distinct]
    if any(omitted) and not index_0:
        raise ValueError("a result is not shown to be the same for all instances of an axis that its spec omits")

    def on_device(*leaves):
        leaves = [jnp.squeeze(leaf, _places(axes, names)) for leaf, axes in zip(leaves, program.inputs, strict=True)]
        return [
            [jnp.expand_dims(jnp.expand_dims(leaf, _places(axes, names)), range(len(left))) for leaf in results]
            for results, axes, left in zip(inner(*leaves), program.outputs.distinct, omitted, strict=True)
        ]

    spread = jax.shard_map(
        on_device,
        mesh=_renamed(program, names),
        in_specs=tuple(_partition(axes, names) for axes in program.inputs),
        out_specs=[
            PartitionSpec(*left, *_partition(axes, names))
            for left, axes in zip(omitted, program.outputs.distinct, strict=True)
        ],
        check_vma=False,  # psum transposes to psum, as it did under xmap
    )
    return lambda *leaves: [
        [leaf[(0,) * len(left)] for leaf in results] for left, results in zip(omitted, spread(*leaves), strict=True)
    ]


def _renamed(program, names) -> Mesh:
    logical = {program.placements[name].mesh_axes[0]: name for name in names}
    mesh = program.placements.mesh
    # A mesh axis that keeps its own name must not look like a logical one to the body.
    kept = {axis: f"mesh axis {axis}" if axis in program.sizes else axis for axis in mesh.axis_names}
    return Mesh(mesh.devices, tuple(logical.get(axis, kept[axis]) for axis in mesh.axis_names))


def _partition(axes, names) -> PartitionSpec:
    split = [None] * (1 + max((position for _, position in axes.positions), default=-1))
    for name, position in axes.positions:
        split[position] = name if name in names else None
    return PartitionSpec(*split)


def _places(axes, names) -> tuple[int, ...]:
    return tuple(position for name, position in axes.positions if name in names)
