"""The names of mesh-transformer-jax that jax 0.4.13 and 0.4.30 had already lost; nothing for today's jax."""

import functools
import typing

import jax
import jax.experimental.maps as maps
import jax.experimental.pjit as pjit_module
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec


def put_back():
    jax.tree_multimap = jax.tree_util.tree_map
    resource_env = maps.ResourceEnv

    def partition_spec(*parts):
        return PartitionSpec(*map(_hashable, parts))

    def mesh(devices, names):
        return Mesh(devices, names)

    def resource_env_with_loops(mesh, loops=()):
        return resource_env(mesh, loops)

    jax.experimental.PartitionSpec = partition_spec
    maps.Mesh = Mesh
    maps.mesh = mesh
    maps.ResourceEnv = resource_env_with_loops
    if not hasattr(pjit_module, "with_sharding_constraint"):
        pjit_module.with_sharding_constraint = jax.lax.with_sharding_constraint
    pjit_module.pjit = functools.partial(_pjit, pjit_module.pjit)
    if not hasattr(optax, "AdditiveWeightDecayState"):
        optax.OptState = typing.NamedTuple
        optax.AdditiveWeightDecayState = optax.EmptyState
        optax.additive_weight_decay = optax.add_decayed_weights


def _hashable(part):
    return tuple(part) if isinstance(part, list) else part


def _pjit(pjit, fun, in_axis_resources, out_axis_resources, **rest):
    """The old keywords; and arguments on one device are taken, as they were when V2's load_ckpt was written."""
    jitted = pjit(fun, in_shardings=in_axis_resources, out_shardings=out_axis_resources, **rest)
    return lambda *args: jitted(*jax.tree_util.tree_map(_anywhere, args))


def _anywhere(leaf):
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 else leaf
