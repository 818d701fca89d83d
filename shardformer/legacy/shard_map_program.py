"""`shard_map` over a mesh whose axes carry the logical names, for programs that `vmap` rejects.

These are collectives over groups of instances, partial permutations, and collectives over two names. They work if
every device has one position of the axis, as under xmap. All other programs use vmap: see mapped_program.py.
"""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

_tracing = contextvars.ContextVar("whether the body of such a shard_map is being traced", default=False)


class NotProvenEqual(ValueError):
    """A result's spec omits an axis, and nothing here proves that the result is the same along it."""


def axes_one_per_device(placements, sizes: dict) -> tuple:
    """Returns the named axes that have their mesh axes to themselves, with one position on each device.

    Several mesh axes of one name must be neighbours in the mesh, in its order: they become one axis of the new mesh.
    """
    if placements.mesh is None or any(placement.loops for _, placement in placements.by_name):
        return ()
    used = [axis for name in sizes for axis in placements[name].mesh_axes]

    def fits(name) -> bool:
        axes = placements[name].mesh_axes
        if not isinstance(name, str) or not axes or any(used.count(axis) > 1 for axis in axes):
            return False
        start = placements.mesh.axis_names.index(axes[0])
        neighbours = placements.mesh.axis_names[start : start + len(axes)] == axes
        return neighbours and sizes[name] == placements.devices(name)

    return tuple(filter(fits, sizes))


def is_inside_renamed_mesh() -> bool:
    """Returns True while the body of such a shard_map is traced: its mesh axes cannot be renamed again."""
    return _tracing.get()


def map_over_devices(program, body, index_0: bool = False):
    """`body` on every device, for the axes that match a mesh axis one to one; the others are vmaps inside it.

    index_0: take a result whose spec omits an axis at index 0 of it, since nothing proves it equal along the axis.
    """
    names = axes_one_per_device(program.placements, program.sizes)
    inner = program.over_axes(body, [name for name in program.sizes if name not in names], names, index_0)
    omitted = [tuple(name for name in names if name not in axes.names) for axes in program.outputs.distinct]
    if any(omitted) and not index_0:
        raise NotProvenEqual("a result is not known to be the same for all instances of an axis that its spec omits")

    def on_device(*leaves):
        leaves = [jnp.squeeze(leaf, _positions(axes, names)) for leaf, axes in zip(leaves, program.inputs, strict=True)]
        with _tracing_body():
            by_spec = inner(*leaves)
        return [
            [jnp.expand_dims(jnp.expand_dims(leaf, _positions(axes, names)), range(len(left))) for leaf in results]
            for results, axes, left in zip(by_spec, program.outputs.distinct, omitted, strict=True)
        ]

    mapped = jax.shard_map(
        on_device,
        mesh=_rename_axes(program, names),
        in_specs=tuple(_partition(axes, names) for axes in program.inputs),
        out_specs=[
            PartitionSpec(*left, *_partition(axes, names))
            for left, axes in zip(omitted, program.outputs.distinct, strict=True)
        ],
        check_vma=False,  # psum transposes to psum, as it did under xmap
    )
    return lambda *leaves: [
        [leaf[(0,) * len(left)] for leaf in results] for left, results in zip(omitted, mapped(*leaves), strict=True)
    ]


@contextlib.contextmanager
def _tracing_body():
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def _rename_axes(program, names) -> Mesh:
    """Returns the mesh with one axis for each of `names`, on the same devices in the same order."""
    mesh = program.placements.mesh
    logical = {axis: name for name in names for axis in program.placements[name].mesh_axes}
    shape: dict[str, int] = {}
    for axis in mesh.axis_names:
        # A mesh axis that keeps its name must not be mistaken for a logical one in the body.
        name = logical.get(axis, f"mesh axis {axis}" if axis in program.sizes else axis)
        shape[name] = shape.get(name, 1) * mesh.shape[axis]
    return Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape))


def _partition(axes, names) -> PartitionSpec:
    split = [None] * (1 + max((position for _, position in axes.positions), default=-1))
    for name, position in axes.positions:
        split[position] = name if name in names else None
    return PartitionSpec(*split)


def _positions(axes, names) -> tuple[int, ...]:
    return tuple(position for name, position in axes.positions if name in names)
