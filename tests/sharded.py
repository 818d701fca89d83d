"""Runs one shard module, or any function in shard view, on a small mesh: exactly, or compiled for real devices."""

import math

import haiku as hk
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardformer import collectives, exact
from shardformer.layout import specs

WHOLE = P()


def on_mesh(function, shape, in_specs, out_specs, axes=("dp", "mp"), **options):
    """Returns `function` under shard_map on a mesh; the exact interpreter runs it in float64."""
    mesh = AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    mapped = map_shards(function, mesh, in_specs, out_specs, **options)
    return lambda *arguments: exact.run(mapped, *arguments).outputs


def compile_on_mesh(function, shape, in_specs, out_specs, axes=("dp", "mp"), **options):
    """Returns `function` jitted under shard_map on a mesh of real devices."""
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)
    return jax.jit(map_shards(function, mesh, in_specs, out_specs, **options))


def map_shards(function, mesh, in_specs, out_specs, **options):
    in_specs, out_specs = collectives.drop_unit_axes((in_specs, out_specs), mesh)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def apply(method, config, parameters, *args, mp=4, out_specs=WHOLE, run=on_mesh):
    """Returns the result of a shard module's method on global parameters, each split by its name.

    `run` is `on_mesh`, or `compile_on_mesh` for what the program stores and rounds.
    """
    function = hk.without_apply_rng(hk.transform(method)).apply
    in_specs = (split(parameters, config), *[P() for _ in args])
    return run(function, (1, mp), in_specs, out_specs)(parameters, *args)


def gradient(method, config, parameters, *args, mp=4):
    """Returns the gradient of a method's replicated scalar in its parameters."""
    function = hk.without_apply_rng(hk.transform(method)).apply
    tree = split(parameters, config)
    return on_mesh(jax.grad(function), (1, mp), (tree, *[P() for _ in args]), tree)(parameters, *args)


def split(parameters, config):
    """Returns the specs of parameters with a module's own names; those of one layer have no leading L."""
    tree = specs.parameter_specs({f"transformer/{module}": leaves for module, leaves in parameters.items()}, config)
    return {
        module: {
            name: P(*spec[1:]) if module.startswith("layers") else spec
            for name, spec in tree[f"transformer/{module}"].items()
        }
        for module in parameters
    }


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=shape).astype(np.float32)
