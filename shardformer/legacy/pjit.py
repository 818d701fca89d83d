"""`pjit` and `with_sharding_constraint` of `jax.experimental.pjit`: their specs refer to the mesh around the call."""

import contextvars
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardformer.legacy.mesh_in_scope import current_mesh
from shardformer.legacy.migration import shard_map_helpers
from shardformer.legacy.pmapped_arguments import is_pmapped
from shardformer.legacy.relocation import relocate

NOT_GIVEN = object()
REPLICATED = object()  # what pjit's None meant in a mesh; outside of one it meant nothing, while P() is an error


class NoMeshError(RuntimeError, ValueError):
    """A PartitionSpec outside of a mesh, which was a ValueError in the oldest releases and a RuntimeError later."""


class _LeftToJax:
    """A spec that leaves the layout to the compiler, or to the array; `AUTO(mesh)` was another way to write it."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, _mesh: Mesh):
        return self

    def __repr__(self) -> str:
        return self.name


AUTO, FROM_GDA = _LeftToJax("AUTO"), _LeftToJax("FROM_GDA")


class ParsedPartitionSpec(tuple):
    """The mesh axes of every position of a PartitionSpec, as tuples."""

    user_spec: PartitionSpec | None

    def __new__(cls, user_spec, partitions):
        parsed = super().__new__(cls, partitions)
        parsed.user_spec = user_spec
        return parsed

    @classmethod
    def from_user_input(cls, entry: PartitionSpec | None, arg_name: str, allow_unconstrained_dims: bool = False):
        if entry is not None and not isinstance(entry, PartitionSpec):
            raise TypeError(f"{arg_name} takes a PartitionSpec or None, got {entry!r}")
        if not allow_unconstrained_dims and PartitionSpec.UNCONSTRAINED in (entry or ()):
            raise ValueError(f"{arg_name} takes no unconstrained positions, got {entry}")
        return cls(entry, [_mesh_axes(axes) for axes in entry or ()])

    @property
    def partitions(self) -> tuple:
        return tuple(self)

    def get_partition_spec(self) -> PartitionSpec:
        return self.user_spec if isinstance(self.user_spec, PartitionSpec) else PartitionSpec(*self)


def _mesh_axes(axes) -> tuple | None:
    if axes is PartitionSpec.UNCONSTRAINED:
        return None
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, (list, tuple)) else (axes,)


def pjit(
    fun: Callable,
    in_axis_resources: Any = NOT_GIVEN,
    out_axis_resources: Any = NOT_GIVEN,
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    *,
    in_shardings: Any = NOT_GIVEN,
    out_shardings: Any = NOT_GIVEN,
    static_argnames: str | Sequence[str] | None = None,
    **options,
) -> Callable:
    """`jax.jit` with PartitionSpecs, None (replicated) or prefixes of them, resolved in the mesh around each call.

    A list of specs for the arguments stands for a tuple, as it did; for the results it describes a list.
    in_shardings, out_shardings: the later names, with the same meaning. options: those of jax.jit.
    """
    inputs = _specs("in", in_axis_resources, in_shardings)
    outputs = _specs("out", out_axis_resources, out_shardings)
    static_argnums = _static_positions(fun, static_argnums, static_argnames)
    options |= {
        "static_argnums": static_argnums, "static_argnames": static_argnames, "donate_argnums": donate_argnums
    }  # fmt: skip
    placed = _option_of_device({"in_shardings": inputs, "out_shardings": outputs}, options)

    @functools.cache
    def compiled(mesh: Mesh | None):
        if placed and mesh is not None:
            raise ValueError(f"pjit got {placed} inside of a mesh, which has the devices; leave out one of them")
        sides = {
            "in_shardings": _shardings(inputs, mesh, "pjit's in_axis_resources"),
            "out_shardings": _shardings(outputs, mesh, "pjit's out_axis_resources"),
        }
        given = {side: shardings for side, shardings in sides.items() if shardings is not None}
        return jax.jit(_body_in_mesh(fun, mesh, sides["out_shardings"]), **options, **given), sides["in_shardings"]

    def prepared(args):
        mesh = _auto_mesh(current_mesh())
        _check_nested(mesh)
        jitted, wanted = compiled(mesh)
        # A static argument left at its default has no place among args; jax counts a negative one from their end.
        statics = {position + len(args) if position < 0 else position for position in static_argnums}
        if wanted is not None:
            return jitted, _move_arguments(args, wanted, statics)
        return jitted, args if mesh is None else _put_on_mesh(args, mesh, statics)

    @functools.wraps(fun)
    def call(*args, **kwargs):
        jitted, args = prepared(args)
        return jitted(*args, **kwargs)

    def lower(*args, **kwargs):
        jitted, args = prepared(args)
        return jitted.lower(*args, **kwargs)

    call.lower = lower  # type: ignore[attr-defined]  # functions take attributes
    return call


def with_sharding_constraint(x: Any, axis_resources: Any):
    """x with the layout of PartitionSpecs of the mesh in scope; a NoMeshError without a mesh."""
    for spec in jax.tree.leaves(axis_resources, is_leaf=_is_none):
        _check_type(spec, "with_sharding_constraint")
    specs = _replace_none(PartitionSpec(), axis_resources)
    return _constrain(x, _shardings(specs, _auto_mesh(current_mesh()), "with_sharding_constraint"))


def lax_with_sharding_constraint(x: Any, shardings: Any):
    """`jax.lax.with_sharding_constraint`, whose PartitionSpecs may refer to a mesh that `with mesh:` entered."""
    mesh = _auto_mesh(current_mesh())

    def resolve(spec):
        if not isinstance(spec, PartitionSpec):
            return spec
        if mesh is not None:
            return _named_sharding(mesh, spec, "with_sharding_constraint")
        if jax.sharding.get_abstract_mesh().empty:
            raise _outside_of_a_mesh("with_sharding_constraint", spec)
        return spec

    return _constrain(x, jax.tree.map(resolve, shardings))


def _constrain(x: Any, shardings: Any):
    """Returns x in a layout; an array that has the layout is returned as it is, as it was then."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.sharding == shardings:
        return x
    return shard_map_helpers.with_sharding_constraint(x, shardings)


def _body_in_mesh(fun: Callable, mesh: Mesh | None, layouts: Any) -> Callable:
    """Returns a function that does as `fun`, whose results go to their layouts as in `with_sharding_constraint`."""

    @functools.wraps(fun)
    def body(*args, **kwargs):
        token = _enclosing.set(mesh)
        try:
            return shard_map_helpers.to_joined_axes(fun(*args, **kwargs), layouts)
        finally:
            _enclosing.reset(token)

    return shard_map_helpers.remembered(fun, body, mesh, layouts)


_enclosing: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("the mesh of a traced pjit", default=None)


def _check_nested(mesh: Mesh | None) -> None:
    outer = _enclosing.get()
    if mesh is not None and outer is not None and set(mesh.devices.flat) != set(outer.devices.flat):
        raise RuntimeError(
            f"a pjit in the mesh {mesh} is called inside of one in {outer}; the physical mesh cannot change inside of "
            "a pjit; enter one mesh around both"
        )


def _static_positions(fun: Callable, numbers: int | Sequence[int] | None, names: str | Sequence[str] | None):
    """Returns the positions of static arguments; without numbers, those of the names, as jax finds them."""
    if numbers is None:
        named = (names,) if isinstance(names, str) else names or ()
        numbers = [
            position
            for position, parameter in enumerate(_signature(fun) if named else ())
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in named
        ]
    return tuple(map(operator.index, numbers if isinstance(numbers, Iterable) else (numbers,)))


def _signature(fun: Callable) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(fun).parameters.values()
    except ValueError:  # a builtin like `max` tells none, and jax then finds no positions either
        return ()


def _option_of_device(layouts: dict[str, Any], options: dict[str, Any]) -> str | None:
    """Returns the option that names a device, with which there are no layouts; None if none does."""
    places = layouts | {name: options.get(name) for name in ("device", "backend")}
    given = [name for name, place in places.items() if place is not None and place is not REPLICATED]
    if not given or given[-1] in layouts:
        return None
    if len(given) > 1:
        raise ValueError(f"pjit got both {given[0]} and {given[-1]}; give one of them")
    return given[0]


def _specs(side: str, resources: Any, shardings: Any):
    """Returns the specs of one side under either keyword; None if neither is given, which asks for nothing."""
    if resources is not NOT_GIVEN and shardings is not NOT_GIVEN:
        raise ValueError(f"pjit got both {side}_axis_resources and {side}_shardings; give one of them")
    specs = shardings if resources is NOT_GIVEN else resources
    if specs is NOT_GIVEN:
        return None
    for spec in jax.tree.leaves(specs, is_leaf=_is_none):
        _check_type(spec, f"pjit's {side}_axis_resources")
    listed = side == "in" and isinstance(specs, list)  # the arguments are a tuple, the results may be a list
    return _replace_none(REPLICATED, tuple(specs) if listed else specs)


def _check_type(spec: Any, what: str) -> None:
    if not (spec is None or spec is AUTO or spec is FROM_GDA or isinstance(spec, PartitionSpec | Sharding)):
        raise TypeError(f"{what} takes PartitionSpecs, None, or pytrees of them; got {spec!r}")


def _named_sharding(mesh: Mesh, spec: PartitionSpec, what: str) -> NamedSharding:
    axes = [axis for entry in spec for axis in _mesh_axes(entry) or ()]
    if len(set(axes)) < len(axes):  # jax's error is no ValueError any more, which programs expect
        raise ValueError(f"{what} got {spec}, which has a mesh axis twice; an axis can split one position")
    return NamedSharding(mesh, spec)


def _outside_of_a_mesh(what: str, spec: PartitionSpec) -> NoMeshError:
    return NoMeshError(f"{what} got {spec} outside of a mesh; call it inside `with Mesh(devices, axis_names):`")


def _replace_none(replicated: Any, resources: Any):
    return jax.tree.map(lambda spec: replicated if spec is None else spec, resources, is_leaf=_is_none)


def _shardings(specs: Any, mesh: Mesh | None, what: str):
    def sharding(spec):
        if isinstance(spec, Sharding):
            return spec
        if spec is AUTO or spec is FROM_GDA:
            return None
        if spec is REPLICATED:
            return None if mesh is None else NamedSharding(mesh, PartitionSpec())
        if mesh is None:
            raise _outside_of_a_mesh(what, spec)
        return _named_sharding(mesh, spec, what)

    return jax.tree.map(sharding, specs)


def _auto_mesh(mesh: Mesh | None) -> Mesh | None:
    """An Auto mesh: legacy code leaves the layout between constraints to the compiler."""
    if mesh is None or all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _move_arguments(args: tuple, wanted: Any, statics: Sequence[int]) -> tuple:
    """Moves arrays that were committed to another layout, as pjit did and jax.jit refuses to."""
    moving = [position for position in range(len(args)) if position not in statics]
    arrays = tuple(args[position] for position in moving)
    try:
        layout = jax.tree.broadcast(wanted, arrays, is_leaf=_is_none)
    except ValueError as error:
        fit = f"pjit's in_axis_resources does not fit the call's {len(arrays)} arguments"
        raise ValueError(f"{fit}; give a spec for each, or for a whole subtree: {error}") from None
    moved = dict(zip(moving, jax.tree.map(_move, arrays, layout), strict=True))
    return tuple(moved.get(position, arg) for position, arg in enumerate(args))


def _put_on_mesh(args: tuple, mesh: Mesh, statics: Iterable[int]) -> tuple:
    """Puts the arguments on the devices of the mesh, as pjit did where nothing asks for a layout.

    If an array is committed to devices, the others follow it there. The result of a pmap over other devices does not
    count as committed.
    """

    def has_a_place(leaf) -> bool:
        if isinstance(leaf, jax.core.Tracer):
            return True
        return getattr(leaf, "committed", False) and not (is_pmapped(leaf) and leaf.devices() != set(mesh.devices.flat))

    arrays = [arg for position, arg in enumerate(args) if position not in statics]
    if any(map(has_a_place, jax.tree.leaves(arrays))):
        return args
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(leaf):
        return jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return tuple(arg if position in statics else jax.tree.map(put, arg) for position, arg in enumerate(args))


def _move(array, sharding: Sharding | None):
    if sharding is None or not isinstance(array, jax.Array):
        return array
    return relocate(array, sharding)


def _is_none(spec) -> bool:
    return spec is None
