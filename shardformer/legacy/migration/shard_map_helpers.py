"""shard_map in the way that xmap was called. `shardformer legacy --migrate` wrote this file; it needs only jax."""

import contextlib
import contextvars
import functools
import math
import pickle
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_mesh = contextvars.ContextVar("the mesh in scope", default=None)


@contextlib.contextmanager
def mesh_scope(mesh):
    """Makes `mesh` the mesh of a block, for jax and for `shard_map_over_mesh`; enters another context as it is."""
    if not isinstance(mesh, Mesh):
        with mesh as entered:
            yield entered
        return
    token = _mesh.set(mesh)
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        _mesh.reset(token)


def set_mesh(mesh):
    """Makes `mesh` the mesh from now on; an empty mesh ends the last one."""
    _mesh.set(mesh)
    jax.set_mesh(mesh)


def mesh_in_scope():
    """Returns the mesh in scope; while a gradient is traced, only `mesh_scope` and `set_mesh` can tell it."""
    mesh = _mesh.get()
    if mesh is None:
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # a transformation is being traced
            mesh = None
    if mesh is None or mesh.empty:
        raise ValueError("no mesh is in scope; call inside `with mesh_scope(Mesh(devices, axis_names)):`")
    return mesh


def physical_mesh():
    """Returns the mesh in scope, or an empty mesh, as `pxla.thread_resources.env.physical_mesh` was.

    While a function is traced in a scope of another copy of this file, only the mesh without its devices is known.
    """
    try:
        return mesh_in_scope()
    except ValueError:
        abstract = jax.sharding.get_abstract_mesh()
        return _entered_mesh() if abstract.empty else abstract


def _entered_mesh():
    """Returns the mesh of `with mesh:` in code that was not migrated, as long as jax knows it; or an empty mesh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resources = getattr(pxla, "thread_resources", None)
    return Mesh(np.empty((), object), ()) if resources is None else resources.env.physical_mesh


_constrain = jax.lax.with_sharding_constraint


def with_sharding_constraint(x, shardings):
    """`jax.lax.with_sharding_constraint`, in two steps where XLA would compute a product wrongly.

    On 2x2x2 CPU devices, x @ w with w of P("mp", "fsdp") and a result of P(("dp", "fsdp"), None, "mp") is 100% off, and
    its gradients are (jax 0.10 to 0.12). With the joined axes ("dp", "fsdp") first and "mp" after, it is right.
    """
    return _constrain(to_joined_axes(x, shardings), shardings)


def to_joined_axes(x, shardings):
    """Returns x after the first of the two steps, where two are needed; a layout None asks for nothing."""
    if not has_joined_axes(shardings):
        return x

    def constrain(sharding, part):
        joined = _joined_axes(sharding)
        return part if joined is None or not _is_split_wrongly(sharding) else _constrain(part, joined)

    try:
        return jax.tree.map(constrain, shardings, x, is_leaf=_is_layout)
    except ValueError:  # of layouts that do not fit x, about which the error of the second step is
        return x


def has_joined_axes(shardings):
    return any(_joined_axes(sharding) is not None for sharding in jax.tree.leaves(shardings))


def _joined_axes(sharding):
    """Returns a layout with only the positions that are split over two or more axes; None if there are no others."""
    named = isinstance(sharding, NamedSharding)
    if not named and not isinstance(sharding, PartitionSpec):
        return None
    spec = sharding.spec if named else sharding
    joined = PartitionSpec(*[axes if isinstance(axes, tuple) and len(axes) > 1 else None for axes in spec])
    if not any(joined) or joined == spec:
        return None
    return NamedSharding(sharding.mesh, joined) if named else joined


def _is_split_wrongly(sharding):
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else physical_mesh()
    return jax.default_backend() == "cpu" and sum(size > 1 for size in mesh.shape.values()) >= 3


BODIES = "__shardformer_bodies__"  # the attribute of a function that has its `_Bodies`


def remembered(fun, body, *reasons):
    """Returns the first `body` of `fun` that was made for these reasons, which are trees.

    jax caches traces by function, but `fun` may look up the mesh. Programs pjit one function again at each step.
    """
    if not isinstance(fun, types.FunctionType):
        return body
    bodies = fun.__dict__.get(BODIES)
    if bodies is None or bodies.owner is not fun:  # functools.wraps gives a function the attributes of another
        bodies = fun.__dict__[BODIES] = _Bodies(fun, {})
    leaves, structure = jax.tree.flatten(reasons, is_leaf=_is_layout)
    return bodies.by_reason.setdefault((*leaves, structure), body)


class _Bodies(typing.NamedTuple):
    """The functions that jax traces for one of the program.

    The function itself has them: a table of all functions would keep those that refer to themselves.
    """

    owner: types.FunctionType
    by_reason: dict


def jit_on_backend(fun, backend, **options):
    """Returns `jax.jit(fun, backend=backend)`, which jax rejects while a mesh is set: calls run without the mesh."""
    jitted = jax.jit(fun, backend=backend, **options)

    @functools.wraps(fun)
    def call(*args, **kwargs):
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            return jitted(*args, **kwargs)

    return call


def jit_on_one_device(fun, **options):
    """Returns `jax.jit` of fun, which moves arrays over several devices to the device that others are committed to.

    Up to jax 0.4, the results of a pmap went there; jax.jit rejects them. As fun's results are not committed to the
    device, a pmap accepts them; when they return as arguments, the call moves arrays to that device again.
    """
    return _JittedOnOneDevice(fun, options)


class _JittedOnOneDevice:
    def __init__(self, fun, options):
        functools.update_wrapper(self, fun, updated=())  # without the members of another jitted function
        self._jitted = jax.jit(fun, **options)
        self._device = None  # that of the last call that moved arrays

    def __call__(self, *args, **kwargs):
        return self._on_one_device(self._jitted, args, kwargs)

    def lower(self, *args, **kwargs):
        return self._on_one_device(self._jitted.lower, args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "_jitted"), name)  # a copy has no _jitted yet

    def _on_one_device(self, run, args, kwargs):
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return run(*args, **kwargs)
        on_one = [array for array in arrays if len(array.devices()) == 1]
        wanted = {device for array in on_one if array.committed for device in array.devices()}
        if not wanted:
            wanted = {device for array in on_one for device in array.devices() if device == self._device}
        if len(wanted) != 1 or len(on_one) == len(arrays):
            return run(*args, **kwargs)
        (self._device,) = wanted
        with jax.default_device(self._device):
            args, kwargs = jax.tree.map(_uncommitted, (args, kwargs))
            return run(*args, **kwargs)


def _uncommitted(x):
    """Returns an array that is committed to devices as one that is not, in its type."""
    if not isinstance(x, jax.Array) or not x.committed:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return pickle.loads(pickle.dumps(x)) if x.weak_type else np.asarray(x)  # numpy has no weak types


def in_joined_layouts(fun, shardings):
    """Returns a function that does as `fun`, whose results go to their layouts as in `with_sharding_constraint`."""

    @functools.wraps(fun)
    def body(*args, **kwargs):
        return to_joined_axes(fun(*args, **kwargs), shardings)

    return remembered(fun, body, shardings) if has_joined_axes(shardings) else fun


def jit_in_layout(fun, in_shardings=None, out_shardings=None, static_argnums=(), **options):
    """Returns `jax.jit` of fun with these layouts, which moves arrays in another layout, as pjit did.

    jax.jit rejects them, and in `mesh_scope` the result of each operation is stored over the mesh. Results go to their
    layout as in `with_sharding_constraint`.
    """

    fun = in_joined_layouts(fun, out_shardings)
    layouts = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    jitted = jax.jit(fun, static_argnums=static_argnums, **layouts, **options)
    statics = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    def moved(args):
        moving = [number for number in range(len(args)) if number not in statics and number - len(args) not in statics]
        arrays = _move_to(in_shardings, tuple(args[number] for number in moving))
        by_number = dict(zip(moving, arrays, strict=True))
        return [by_number.get(number, arg) for number, arg in enumerate(args)]

    @functools.wraps(fun)
    def call(*args, **kwargs):
        return jitted(*moved(args), **kwargs)

    def lower(*args, **kwargs):
        return jitted.lower(*moved(args), **kwargs)

    call.lower = lower
    return call


def _move_to(shardings, arrays):
    """Returns the arrays in the layouts of a prefix of their tree; None leaves an array where it is."""

    def move(sharding, subtree):
        if sharding is None:
            return subtree
        return jax.tree.map(functools.partial(_put, sharding=sharding), subtree)

    return jax.tree.map(move, shardings, arrays, is_leaf=_is_layout)


def _is_layout(value):
    return value is None or isinstance(value, PartitionSpec | jax.sharding.Sharding)


def _put(x, sharding):
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return x
    wanted = NamedSharding(mesh_in_scope(), sharding) if isinstance(sharding, PartitionSpec) else sharding
    return jax.device_put(x, wanted)


def shard_map_over_mesh(fun, in_specs, out_specs, axes, axis_sizes=(), donate_argnums=()):
    """Maps `fun` over named axes that are stored over mesh axes; `fun` does not see the mapped positions.

    axes: the mesh axis, or a tuple of them, of each name in the specs and in `fun`. axis_sizes: of names that no
    argument has. The mesh is looked up at each call. Axes as long as their mesh axes run under shard_map, with one
    index on each device. If an axis is longer, or a result varies along an axis that its spec omits, all of them run
    under vmap, and XLA splits the work over the mesh.
    """
    compiled = {}

    @functools.wraps(fun)
    def call(*args):
        mesh = mesh_in_scope()
        ins = (in_specs,) * len(args) if _is_spec(in_specs) else in_specs
        sizes = {name: _mesh_size(mesh, axis) for name, axis in axes.items()} | dict(axis_sizes) | _lengths(ins, args)
        for name, size in sizes.items():
            if size % _mesh_size(mesh, axes[name]):
                raise ValueError(
                    f"the axis {name!r} has length {size}; it must be a multiple of the mesh axis {axes[name]!r}, "
                    f"which has {_mesh_size(mesh, axes[name])} devices"
                )
        key = mesh, *sizes.items(), len(args)
        if key not in compiled:
            by_vmap = functools.partial(_by_vmap, fun, ins, out_specs, axes, mesh, sizes)
            one_per_device = all(mesh.shape.get(axes[name]) == size for name, size in sizes.items())
            if one_per_device and _is_repeated(by_vmap(index_0=False), args):
                mapped, named = _by_shard_map(fun, ins, out_specs, axes, mesh)
            else:
                mapped, named = by_vmap(), mesh
            compiled[key] = jax.jit(mapped, donate_argnums=donate_argnums), named.abstract_mesh
        jitted, abstract_mesh = compiled[key]
        with jax.sharding.use_abstract_mesh(abstract_mesh):
            return jitted(*args)

    return call


def _is_repeated(proof, args):
    """Returns True unless vmap finds that a result varies along an axis that its spec omits."""
    try:
        jax.eval_shape(proof, *args)
    except ValueError as error:
        return "out_axes" not in str(error)  # an error of the body will recur
    except (NotImplementedError, AssertionError):  # vmap lacks some collectives
        return True
    return True


def _by_shard_map(fun, in_specs, out_specs, axes, mesh):
    """Returns the mapped function, with one index of each axis on each device, and its mesh."""

    def positions(spec):
        return tuple(position for position, name in enumerate(spec) if name is not None)

    def squeeze(spec, tree):
        return jax.tree.map(lambda x: jnp.squeeze(x, positions(spec)), tree)

    def expand(spec, tree):
        return jax.tree.map(lambda x: jnp.expand_dims(x, positions(spec)), tree)

    def on_one_device(*args):
        args = jax.tree.map(squeeze, in_specs, args, is_leaf=_is_spec)
        return jax.tree.map(expand, out_specs, fun(*args), is_leaf=_is_spec)

    names = {axis: name for name, axis in axes.items()}
    unused = {axis: f"mesh axis {axis}" if axis in axes else axis for axis in mesh.axis_names}
    named = Mesh(mesh.devices, [names.get(axis, unused[axis]) for axis in mesh.axis_names])
    # check_vma=False keeps the transposes of xmap: psum to psum, pmean to pmean.
    mapped = jax.shard_map(on_one_device, mesh=named, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped, named


def _by_vmap(fun, in_specs, out_specs, axes, mesh, sizes, index_0=True):
    """Returns the mapped function of unsharded arrays.

    A result whose spec omits an axis is taken at its index 0; without `index_0`, vmap raises if the result varies.
    """
    names = list(sizes)

    def place(spec, tree):
        over = NamedSharding(mesh, PartitionSpec(*[axes.get(name) for name in spec]))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, over), tree)

    def over_axis(body, name, outer):
        def position(spec):
            """Returns the position of the axis after the outer ones are removed."""
            result = [name for name in spec if name not in outer]
            return result.index(name) if name in result else None

        def out_position(spec):
            return 0 if index_0 and name not in spec else position(spec)

        def mapped(*args):
            results = jax.vmap(
                body,
                in_axes=jax.tree.map(position, in_specs, is_leaf=_is_spec),
                out_axes=jax.tree.map(out_position, out_specs, is_leaf=_is_spec),
                axis_name=name,
                axis_size=sizes[name],
                spmd_axis_name=placed_axes(mesh, axes[name]),
            )(*args)
            return jax.tree.map(first, out_specs, results, is_leaf=_is_spec) if index_0 else results

        def first(spec, tree):
            return tree if name in spec else jax.tree.map(lambda x: x[0], tree)

        return mapped

    body = fun
    for depth in reversed(range(len(names))):
        body = over_axis(body, names[depth], names[:depth])

    def over_mesh(*args):
        args = jax.tree.map(place, in_specs, args, is_leaf=_is_spec)
        return jax.tree.map(place, out_specs, body(*args), is_leaf=_is_spec)

    return over_mesh


def _is_spec(entry):
    return isinstance(entry, PartitionSpec)


def _mesh_size(mesh, axis):
    return math.prod(mesh.shape[each] for each in (axis if isinstance(axis, tuple) else (axis,)))


def _lengths(specs, args):
    """Returns the length of each named axis of the arguments."""
    result = {}

    def note(spec, tree):
        for leaf in jax.tree.leaves(tree):
            result.update({name: np.shape(leaf)[i] for i, name in enumerate(spec) if name is not None})

    jax.tree.map(note, specs, args, is_leaf=_is_spec)
    return result


def device_put_replicated(x, devices):
    """Repeats a tree along a new leading axis, once on each device."""
    return jax.tree.map(lambda leaf: _put_over(devices, [leaf] * len(devices)), x)


def device_put_sharded(shards, devices):
    """Stacks a list of trees into one tree; index i of each leaf is stored on device i."""
    return jax.tree.map(lambda *leaves: _put_over(devices, leaves), *shards)


def _put_over(devices, leaves):
    """Returns the array of `leaves` in their common type, of which each goes to its device from wherever it lies."""
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # they lie nowhere yet
        return jax.device_put(jnp.stack(leaves), sharding)
    rows = [jax.device_put(leaf, device)[None] for leaf, device in zip(leaves, devices, strict=True)]
    dtype = jnp.result_type(*rows)
    rows = [row if row.dtype == dtype else row.astype(dtype) for row in rows]  # keys have no astype
    return jax.make_array_from_single_device_arrays((len(devices), *rows[0].shape[1:]), sharding, rows)


# Convolutions under vmap ----------------------------------------------------------------------------------------------
# vmap turns a convolution whose two operands are mapped into one with groups. XLA's partitioner splits the features of
# some of these (kernels of one position, or as large as the input) as if there were no groups: wrong results without an
# error. Here such a convolution runs under `shard_map` over the mesh axes of the mapped axis, out of its reach.


class PlacedAxis(str):
    """The name of a mesh axis, for vmap's `spmd_axis_name`, which knows its mesh.

    It equals its plain name. Two of different meshes differ, so that JAX's caches do not confuse them.
    """

    def __new__(cls, name, mesh):
        self = super().__new__(cls, name)
        self.mesh = mesh
        return self

    def __eq__(self, other):
        is_same_mesh = not isinstance(other, PlacedAxis) or self.mesh == other.mesh
        return isinstance(other, str) and str.__eq__(self, other) and is_same_mesh

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def placed_axes(mesh, axes):
    """Returns `spmd_axis_name` of vmap for one or more axes of `mesh`."""
    return tuple(PlacedAxis(axis, mesh) for axis in (axes if isinstance(axes, tuple) else (axes,)))


_convolution = jax.lax.conv_general_dilated_p
_batch_by_groups = batching.fancy_primitive_batchers[_convolution]


def _batch(axis_data, operands, positions, **parameters):
    axes = axis_data.spmd_name or ()
    is_shared = all(position is None for position in positions)
    inside_a_device = bool(jax.sharding.get_abstract_mesh().manual_axes)  # of the shard_map for another axis, below
    if is_shared or inside_a_device or not axes or not isinstance(axes[0], PlacedAxis):
        return _batch_unplaced(axis_data, operands, positions, **parameters)
    convolve = functools.partial(_convolution.bind, **_without_sharding(parameters))
    on_devices = jax.shard_map(
        jax.vmap(convolve, positions),
        mesh=axes[0].mesh,
        in_specs=tuple(_split(position, axes) for position in positions),
        out_specs=_split(0, axes),
        check_vma=False,
    )
    return on_devices(*operands), 0


def _batch_unplaced(axis_data, operands, positions, **parameters):
    try:
        return _batch_by_groups(axis_data, operands, positions, **parameters)
    except NotImplementedError:
        # JAX's transposes ask for an output layout without any split, which its rule for groups rejects.
        return _batch_by_groups(axis_data, operands, positions, **_without_sharding(parameters))


def _without_sharding(parameters):
    wanted = parameters["out_sharding"]
    if wanted is not None and any(part is not None for part in wanted.spec):
        raise NotImplementedError("a convolution with an explicit out_sharding is not mapped over devices")
    return parameters | {"out_sharding": None}


def _split(position, axes):
    return PartitionSpec() if position is None else PartitionSpec(*[None] * position, axes)


batching.fancy_primitive_batchers[_convolution] = _batch
