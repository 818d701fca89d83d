"""For what `vmap` refuses: `shard_map` over a mesh whose axes carry the logical names.

Groups of instances, a permutation of some of them only and one collective over two names work where every device has
one position of the axis, which is where they always worked. Everything else is a matter for vmap: see program.py.
"""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

_around = contextvars.ContextVar("whether the body of such a shard_map is being traced", default=False)


class NotShown(ValueError):
    """That a result is the same for all instances: here nothing knows."""


def one_to_one(placements, sizes: dict) -> tuple:
    """The named axes that are each one mesh axis of its own, with one position on each device."""
    if placements.mesh is None or any(placement.loops for _, placement in placements.of):
        return ()
    used = [axis for name in sizes for axis in placements[name].mesh_axes]
    fits = lambda name: [used.count(axis) for axis in placements[name].mesh_axes] == [1]
    return tuple(
        name for name in sizes if isinstance(name, str) and fits(name) and sizes[name] == placements.devices(name)
    )


def is_around() -> bool:
    """Whether a mesh with renamed axes is in force already: its axes cannot take other names within."""
    return _around.get()


def over_devices(program, body, index_0: bool = False):
    """`body` on every device, for the axes that are one to one with the mesh; the others stay vmaps inside of it.

    Nothing shows here that a result is the same for all instances: one whose spec omits an axis is read at index 0.
    """
    names = one_to_one(program.placements, program.sizes)
    inner = program.over_axes(body, [name for name in program.sizes if name not in names], names, index_0)
    omitted = [tuple(name for name in names if name not in axes.names) for axes in program.outputs.distinct]
    if any(omitted) and not index_0:
        raise NotShown("nothing shows that a result is the same for all instances of an axis that its spec omits")

    def on_device(*leaves):
        leaves = [jnp.squeeze(leaf, _places(axes, names)) for leaf, axes in zip(leaves, program.inputs, strict=True)]
        with _inside():
            by_spec = inner(*leaves)
        return [
            [jnp.expand_dims(jnp.expand_dims(leaf, _places(axes, names)), range(len(left))) for leaf in results]
            for results, axes, left in zip(by_spec, program.outputs.distinct, omitted, strict=True)
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


@contextlib.contextmanager
def _inside():
    token = _around.set(True)
    try:
        yield
    finally:
        _around.reset(token)


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
