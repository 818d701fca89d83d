"""`shard_map` over a mesh whose axes carry the logical names: each device runs the body, and XLA partitions nothing.

It needs one position of every placed axis on each device. mapped_program.py decides which programs run so.
"""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, PartitionSpec, Sharding

_tracing = contextvars.ContextVar("whether the body of such a shard_map is being traced", default=False)


class NotProvenEqual(ValueError):
    """A result's spec omits an axis, and nothing here proves that the result is the same along it."""


def axes_one_per_device(placements, sizes: dict) -> tuple:
    """Returns the named axes that have their mesh axes to themselves, with one position on each device.

    Mesh axes of one name must be neighbours in the mesh, in its order: they become one axis of the new mesh.
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


def computes_the_same(mapped, names: tuple) -> bool:
    """Returns True if a body under `map_over_devices` is known to compute what it computes under vmap.

    mapped: the jaxpr of the mapped function. names: the axes whose instances are on different devices. The gradient
    with respect to a value that the body closes over would be taken outside.
    """
    closes_over_traced = any(isinstance(value, jax.core.Tracer) for value in mapped.consts)
    bodies = _shard_map_bodies(mapped)
    if mapped.effects or closes_over_traced or not bodies:
        return False
    return all(_all_run_on_a_device(body, names) for body in bodies)


def _shard_map_bodies(jaxpr) -> list:
    """Returns the bodies of the shard_maps of a program; from JAX 0.12 on, inlined calls are still calls here."""
    bodies = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            bodies += _inner_jaxprs(equation)
        elif equation.primitive.name in ("jit", "pjit"):
            bodies += [body for inner in _inner_jaxprs(equation) for body in _shard_map_bodies(inner)]
    return bodies


def _all_run_on_a_device(jaxpr, names: tuple) -> bool:
    return all(_runs_on_a_device(equation, names) for equation in jaxpr.eqns)


def _runs_on_a_device(equation, names: tuple) -> bool:
    primitive, inner = equation.primitive.name, _inner_jaxprs(equation)
    if primitive in ("cond", "while") and any(_communicates(jaxpr, names) for jaxpr in inner):
        return (
            False  # under vmap every instance takes every branch; here, devices would wait for others that never come
        )
    if primitive in ("sharding_constraint", "shard_map") or _has_layouts(equation):
        return False  # a layout, also one of an xmap within the body, belongs to unsharded arrays
    if any("rbg" in str(value.aval.dtype) for value in equation.invars if hasattr(value.aval, "dtype")):
        return False  # this generator's draws under vmap are other ones
    return all(_all_run_on_a_device(jaxpr, names) for jaxpr in inner)


def _communicates(jaxpr, names: tuple) -> bool:
    for equation in jaxpr.eqns:
        over = [equation.params.get(key) or () for key in ("axes", "axis_name", "names")]
        used = {name for each in over for name in (each if isinstance(each, tuple | list) else (each,))}
        if equation.primitive.name != "axis_index" and used & set(names):
            return True
        if any(_communicates(inner, names) for inner in _inner_jaxprs(equation)):
            return True
    return False


def _inner_jaxprs(equation) -> list:
    values = [each for value in equation.params.values() for each in (value if isinstance(value, tuple) else (value,))]
    result = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in result if isinstance(jaxpr, Jaxpr)]


def _has_layouts(equation) -> bool:
    layouts = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    return any(isinstance(layout, Sharding) for layout in layouts)


def map_over_devices(program, body, index_0: bool = False, proven: bool = False):
    """`body` on every device, for the axes that match a mesh axis one to one; the others are vmaps inside it.

    index_0: take a result whose spec omits an axis at index 0 of it, since nothing proves it equal along the axis.
    proven: vmap has shown that such a result is equal along the axis, unless index_0.
    """
    names = axes_one_per_device(program.placements, program.sizes)
    inner = program.over_axes(body, [name for name in program.sizes if name not in names], names, index_0)
    omitted = [tuple(name for name in names if name not in axes.names) for axes in program.outputs.distinct]
    if proven and not index_0:
        omitted = [()] * len(omitted)
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
