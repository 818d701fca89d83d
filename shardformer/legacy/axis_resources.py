"""axis_resources: how each named axis is spread over mesh axes, and over the iterations of serial loops."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardformer.legacy.axis_specs import AxisSpec
from shardformer.legacy.mesh_in_scope import current_mesh, thread_resources


@dataclass(frozen=True)
class SerialLoop:
    """A resource that runs an axis in `length` iterations, one slice of its positions after the other."""

    length: int

    def __post_init__(self):
        _check_length(self.length)


def serial_loop(name: Hashable, length: int):
    """Names a loop, for a `with` block, that axis_resources can refer to: its axes are sliced together."""
    _check_length(length)
    return thread_resources.with_loop(name, length)


def _check_length(length):
    if length < 1:
        raise ValueError(f"a serial loop has at least 1 iteration, got {length}")


@dataclass(frozen=True)
class Placement:
    """The resources of one named axis: mesh axes (major to minor), and loops as (loop, length) pairs."""

    mesh_axes: tuple[str, ...] = ()
    loops: tuple[tuple[Hashable, int], ...] = ()

    @property
    def resources(self) -> tuple:
        return (*self.mesh_axes, *(loop for loop, _ in self.loops))

    @property
    def iterations(self) -> int:
        return math.prod(length for _, length in self.loops)


@dataclass(frozen=True)
class Placements:
    """The placement of every named axis on the mesh in scope; `mesh` is None if no axis uses one."""

    mesh: Mesh | None
    by_name: tuple[tuple[Hashable, Placement], ...]

    def __getitem__(self, name) -> Placement:
        return dict(self.by_name)[name]

    def devices(self, name) -> int:
        axes = self[name].mesh_axes
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def sharding(self, axes: AxisSpec) -> NamedSharding:
        """Returns the layout of an unsharded array with these axes."""
        assert self.mesh is not None, "only arrays over a mesh have a layout"
        split: list[Any] = [None] * (1 + max((position for _, position in axes.positions), default=-1))
        for name, position in axes.positions:
            split[position] = self[name].mesh_axes or None
        return NamedSharding(self.mesh, PartitionSpec(*split))

    def check_apart(self, names: tuple, what: str):
        """Rejects two axes of one array on the same resource: the array cannot be split along both."""
        owner: dict[Hashable, Hashable] = {}
        for name in names:
            for resource in self[name].resources:
                if owner.setdefault(resource, name) != name:
                    raise jax.errors.JAXTypeError(
                        f"{what} has the axes {owner[resource]!r} and {name!r}, which axis_resources both puts on "
                        f"{resource!r}; give each axis of one array its own resources"
                    )


_enclosing: contextvars.ContextVar[tuple[Placements, ...]] = contextvars.ContextVar("enclosing xmaps", default=())


@contextlib.contextmanager
def tracing_body(placements: Placements):
    """Marks the placements of an xmap as taken while its body is traced."""
    token = _enclosing.set((*_enclosing.get(), placements))
    try:
        yield
    finally:
        _enclosing.reset(token)


def names_in_scope() -> list:
    """Returns the named axes of all xmaps whose bodies are being traced, the outermost first."""
    return [name for placements in _enclosing.get() for name, _ in placements.by_name]


def scope_key() -> tuple:
    """Returns the state that a call of xmap depends on: the mesh, the loops and the enclosing xmaps."""
    environment = thread_resources.env
    return environment.physical_mesh, environment.loops, _enclosing.get()


def check_resources(axis_resources: Mapping):
    _check_mapping("axis_resources", axis_resources)
    for name, wanted in axis_resources.items():
        if wanted is None or not isinstance(wanted, Hashable):
            raise TypeError(
                f"axis_resources gives the axis {name!r} {wanted!r}; a resource is the name of a mesh axis, several "
                "are a tuple, and an axis without any is left out"
            )
        if isinstance(wanted, tuple) and len(set(wanted)) != len(wanted):
            raise ValueError(
                f"axis_resources gives the axis {name!r} one resource twice: {wanted!r}; list each one once"
            )


def check_sizes(axis_sizes: Mapping):
    _check_mapping("axis_sizes", axis_sizes)
    for name, size in axis_sizes.items():
        if not isinstance(size, int | np.integer) or size < 0:
            raise ValueError(
                f"axis_sizes gives the axis {name!r} the size {size!r}; a size is a whole number, 0 or more"
            )


def _check_mapping(what: str, given):
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is {given!r}; it is a dict by axis name")


def place(names: list, axis_resources: Mapping) -> Placements:
    """Looks up the resources of each axis in the current environment."""
    mesh, loops = current_mesh(), dict(thread_resources.env.loops)
    by_name = []
    for name in names:
        wanted = axis_resources.get(name, ())
        placement = Placement()
        for resource in wanted if isinstance(wanted, tuple) else (wanted,):
            placement = _add_resource(placement, resource, name, mesh, loops)
        by_name.append((name, placement))
    uses_mesh = any(placement.mesh_axes for _, placement in by_name)
    placements = Placements(_auto_mesh(mesh) if mesh is not None and uses_mesh else None, tuple(by_name))
    for outer in _enclosing.get():
        _check_nested(placements, outer)
    return placements


def _check_nested(placements: Placements, outer: Placements):
    if None not in (placements.mesh, outer.mesh) and placements.mesh != outer.mesh:
        raise RuntimeError(
            f"an xmap over the mesh {placements.mesh} is called inside one over {outer.mesh}; "
            "the physical mesh cannot change inside a body: enter one mesh around both"
        )
    taken = {axis: name for name, placement in outer.by_name for axis in placement.mesh_axes}
    for name, placement in placements.by_name:
        for axis in placement.mesh_axes:
            if axis in taken:
                raise jax.errors.JAXTypeError(
                    f"axis_resources puts {name!r} on {axis!r}, which {taken[axis]!r} of the xmap around it "
                    "has already; give the inner axis other resources"
                )


def _add_resource(placement, resource, name, mesh, loops) -> Placement:
    if isinstance(resource, SerialLoop):
        loop = f"SerialLoop {len(placement.loops) + 1} of {name!r}", resource.length
        return dataclasses.replace(placement, loops=(*placement.loops, loop))
    if mesh is not None and resource in mesh.shape:
        return dataclasses.replace(placement, mesh_axes=(*placement.mesh_axes, resource))
    if resource in loops:
        return dataclasses.replace(placement, loops=(*placement.loops, (resource, loops[resource])))
    around = f"the mesh in scope has the axes {tuple(mesh.shape)}" if mesh is not None else "no mesh is in scope"
    raise ValueError(
        f"axis_resources puts the axis {name!r} on {resource!r}, but {around}; call inside "
        f"`with Mesh(devices, (..., {resource!r})):`, or leave the axis without resources"
    )


def _auto_mesh(mesh: Mesh) -> Mesh:
    # jax.make_mesh makes Explicit axes, whose types would have to agree inside the body; xmap had no such types.
    return Mesh(mesh.devices, mesh.axis_names)
