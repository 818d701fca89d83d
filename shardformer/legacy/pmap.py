"""`jax.pmap` with what it has lost: axes named by any object, a pmap inside of another, arrays in other layouts."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from shardformer.legacy import pmap_shardings
from shardformer.legacy.relocation import relocate

_pmap = jax.pmap
_UNNAMED = "pmapped"
# jax's words about an array in another layout; the second ones are for a traced array.
_OF_ANOTHER_LAYOUT = ("does not match the sharding", "Received incompatible devices")


class _AxisName(str):
    """The text of an axis name, equal to the object that the program names the axis by: today's axes are strings."""

    _name: object

    def __new__(cls, name):
        text = super().__new__(cls, name)
        text._name = name
        return text

    def __eq__(self, other) -> bool:
        return self._name == (other._name if isinstance(other, _AxisName) else other)

    def __ne__(self, other) -> bool:  # str has its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self._name)


@functools.wraps(_pmap)
def pmap(
    fun: Callable,
    axis_name: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    axis_size: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    global_arg_shapes: Any = None,
    **options,
) -> Callable:
    if not isinstance(axis_name, str | None):
        axis_name = _AxisName(axis_name)
    axes = {"in_axes": in_axes, "out_axes": out_axes, "axis_size": axis_size}
    statics = static_broadcasted_argnums
    statics = (statics,) if isinstance(statics, int) else tuple(statics)
    axis_of_devices = _UNNAMED if axis_name is None else axis_name
    pmap_shardings.note_pmap(axis_of_devices, devices, options.get("backend"))
    outer = _pmap(fun, axis_of_devices, static_broadcasted_argnums=statics, devices=devices, **axes, **options)

    def with_axes(args, kwargs):
        return (args, kwargs), (_axes_of_arguments(in_axes, statics, len(args)), 0)

    def by_vmap(body, args, kwargs):
        _, (in_axes_of_args, _) = with_axes(args, kwargs)
        name = None if axis_name is None else _AxisName(axis_name)  # for `_batch_permutation`
        return jax.vmap(body, axis_name=name, **axes | {"in_axes": in_axes_of_args})(*args, **kwargs)

    def one_per_device(size: int) -> Mesh:
        chosen = jax.local_devices(backend=options.get("backend")) if devices is None else devices
        return Mesh(np.array(chosen[:size]), (axis_of_devices,))

    def eagerly(body, args, kwargs):
        (size,) = sizes = _sizes(*with_axes(args, kwargs))
        _check_sizes(sizes, devices)
        return _moved(jax.tree.map(jnp.asarray, by_vmap(body, args, kwargs)), out_axes, one_per_device(size))

    @functools.wraps(outer)
    def call(*args, **kwargs):
        if AxisType.Manual in get_abstract_mesh().axis_types:
            if devices is not None:
                raise ValueError(
                    "Nested pmap with explicit devices argument. The outer pmap has chosen the devices; "
                    "leave out the inner one's"
                )
            # Each device of the outer pmap maps the inner axis itself, which gives the same values.
            return by_vmap(fun, args, kwargs)
        is_eager = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # jax adds options as attributes
        if is_eager and not statics and not _may_draw_with_rbg((args, kwargs)):
            # jax's pmap takes seconds for an operation then; it gets what vmap rejects: groups, and wrong sizes.
            of_the_program: list[Exception] = []
            try:
                return eagerly(_noting_errors(fun, of_the_program), args, kwargs)
            except (NotImplementedError, ValueError) as error:
                if any(error is own for own in of_the_program):
                    raise
        try:
            return outer(*args, **kwargs)
        except ValueError as error:  # of sizes too, but about the parts of a layout
            sizes = _sizes(*with_axes(args, kwargs))
            _check_sizes(sizes, devices)
            if not any(words in str(error) for words in _OF_ANOTHER_LAYOUT):
                raise
        # jax.jit, which pmap is today, rejects arrays in another layout; pmap moved them.
        args, kwargs = _moved(*with_axes(args, kwargs), one_per_device(sizes[0]))
        return outer(*args, **kwargs)

    call.lower = outer.lower  # type: ignore[attr-defined]  # functions take attributes
    return call


def _may_draw_with_rbg(arguments: tuple) -> bool:
    """Returns True if a body may draw with the generator "rbg", of which a vmap draws other values than devices do."""
    if "rbg" in jax.config.jax_default_prng_impl:  # type: ignore[attr-defined]
        return True
    return any("rbg" in str(getattr(leaf, "dtype", "")) for leaf in jax.tree.leaves(arguments))


def _noting_errors(fun: Callable, of_the_program: list[Exception]) -> Callable:
    """Returns a function that does as `fun`, and notes the errors that do not come from vmap's rules."""

    @functools.wraps(fun)
    def body(*args, **kwargs):
        try:
            return fun(*args, **kwargs)
        except (NotImplementedError, ValueError) as error:
            if not (isinstance(error, NotImplementedError) and _is_raised_in_jax(error)):
                of_the_program.append(error)
            raise

    return body


def _is_raised_in_jax(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == "jax"


_permutation = jax.lax.ppermute_p
_batch_whole_permutation = batching.fancy_primitive_batchers[_permutation]


def _batch_permutation(axis_data, operands, positions, *, axis_name, perm):
    """jax's rule for `ppermute` under vmap, which lacks permutations of some devices: the others get zeros."""
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    size, of_a_pmap = axis_data.size, isinstance(axis_data.name, _AxisName)
    is_whole = len(perm) == size if len(names) == 1 else size == 1
    if not of_a_pmap or axis_data.name not in names or is_whole:
        return _batch_whole_permutation(axis_data, operands, positions, axis_name=axis_name, perm=perm)
    if len(names) > 1:
        raise NotImplementedError(
            f"ppermute got the axes {tuple(map(str, names))} of pmaps of which one is inside of another; "
            "permute over one axis after the other"
        )
    (x,), (position,) = operands, positions
    rows = jnp.broadcast_to(x, (size, *x.shape)) if position is None else jnp.moveaxis(x, position, 0)
    sources = {destination: source for source, destination in perm}
    return jnp.stack([rows[sources[i]] if i in sources else jnp.zeros_like(rows[0]) for i in range(size)]), 0


batching.fancy_primitive_batchers[_permutation] = _batch_permutation


def _check_sizes(sizes: list[int], devices: Sequence[jax.Device] | None) -> None:
    """Raises a ValueError if the mapped axes have two sizes, or one above the number of devices."""
    available = jax.local_device_count() if devices is None else len(devices)
    if len(sizes) > 1:
        raise ValueError(f"pmap got inconsistent sizes for array axes to be mapped: {sizes}; give them one size")
    if sizes and sizes[0] > available:
        raise ValueError(
            f"pmap got an axis of size {sizes[0]}, which requires {sizes[0]} replicas, but has {available} devices; "
            "map a shorter axis, or use jax.vmap"
        )


def _sizes(arguments: tuple, in_axes: tuple) -> list[int]:
    """Returns the different sizes of the mapped axes."""
    try:
        axes = jax.tree.broadcast(in_axes, arguments, is_leaf=_is_none)
        sizes = jax.tree.map(_size, axes, arguments, is_leaf=_is_none)
    except (IndexError, TypeError, ValueError):  # wrong axes, about which jax's error is
        return []
    return sorted(set(jax.tree.leaves(sizes)))


def _size(axis: int | None, x) -> int | None:
    return None if axis is None else jnp.shape(x)[axis]


def _moved(arguments: tuple, in_axes: tuple, mesh: Mesh) -> tuple:
    """Returns the arguments with each index of a mapped axis on its device."""

    def move(axis: int | None, x):
        if not isinstance(x, jax.Array):
            return x
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, *mesh.axis_names)
        return relocate(x, NamedSharding(mesh, spec))

    axes = jax.tree.broadcast(in_axes, arguments, is_leaf=_is_none)
    return jax.tree.map(move, axes, arguments, is_leaf=_is_none)


def _is_none(axis) -> bool:
    return axis is None


def _axes_of_arguments(in_axes: Any, statics: tuple[int, ...], arguments: int) -> Any:
    """Returns pmap's in_axes for vmap, which has no static arguments but those that are not mapped."""
    if not statics:
        return in_axes
    axes = list(in_axes) if isinstance(in_axes, tuple | list) else [in_axes] * arguments
    for position in statics:
        axes[position] = None
    return tuple(axes)
