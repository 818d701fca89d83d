"""shard_map in the way that xmap was called. `shardformer legacy --migrate` wrote this file; it needs only jax."""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_mesh = contextvars.ContextVar("the mesh in scope", default=None)


@contextlib.contextmanager
def mesh_scope(mesh):
    """Makes `mesh` the mesh of a block, for jax and for `shard_map_over_mesh`."""
    token = _mesh.set(mesh)
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        _mesh.reset(token)


def set_mesh(mesh):
    """Makes `mesh` the mesh from now on."""
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


def shard_map_over_mesh(fun, in_specs, out_specs, axes, donate_argnums=()):
    """Maps `fun` over mesh axes with one index on each device; `fun` does not see the mapped positions.

    axes: the mesh axis of each name in the specs and in `fun`. The mesh is looked up at each call.
    """

    def is_spec(entry):
        return isinstance(entry, PartitionSpec)

    def positions(spec):
        return tuple(position for position, name in enumerate(spec) if name is not None)

    def squeeze(spec, tree):
        return jax.tree.map(lambda x: jnp.squeeze(x, positions(spec)), tree)

    def expand(spec, tree):
        return jax.tree.map(lambda x: jnp.expand_dims(x, positions(spec)), tree)

    def on_one_device(*args):
        specs = (in_specs,) * len(args) if is_spec(in_specs) else in_specs
        args = jax.tree.map(squeeze, specs, args, is_leaf=is_spec)
        return jax.tree.map(expand, out_specs, fun(*args), is_leaf=is_spec)

    @functools.cache
    def compile_for(mesh):
        names = {axis: name for name, axis in axes.items()}
        unused = {axis: f"mesh axis {axis}" if axis in axes else axis for axis in mesh.axis_names}
        named = Mesh(mesh.devices, [names.get(axis, unused[axis]) for axis in mesh.axis_names])
        # check_vma=False keeps the transposes of xmap: psum to psum, pmean to pmean.
        mapped = jax.shard_map(on_one_device, mesh=named, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return named.abstract_mesh, jax.jit(mapped, donate_argnums=donate_argnums)

    @functools.wraps(fun)
    def call(*args):
        abstract_mesh, compiled = compile_for(mesh_in_scope())
        with jax.sharding.use_abstract_mesh(abstract_mesh):
            return compiled(*args)

    return call


def device_put_replicated(x, devices):
    """Repeats a tree along a new leading axis, once on each device."""
    return jax.tree.map(lambda leaf: _put_over(devices, jnp.stack([leaf] * len(devices))), x)


def device_put_sharded(shards, devices):
    """Stacks a list of trees into one tree; index i of each leaf is stored on device i."""
    return jax.tree.map(lambda *leaves: _put_over(devices, jnp.stack(leaves)), *shards)


def _put_over(devices, stacked):
    return jax.device_put(stacked, NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device")))
