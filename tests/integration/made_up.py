"""Updates for gradients that a test makes up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.model import Loss
from tests import sharded, shared

GPT2 = {"block": "sequential", "positions": "learned", "bias": "all", "tied": True, "scan": False}
FINE = Loss(jnp.float32(1), jnp.float32(1), jnp.float32(1))


@functools.cache
def apply(**overrides):
    """Returns the jitted optimizer's part of a step."""
    return jax.jit(shared.trainer(**overrides).update.apply)


def like(params, value):
    return jax.tree.map(lambda p: jnp.full_like(p, value), params)


def noise(params, scale=1.0):
    """Returns the same synthetic gradients on every mesh, split as the parameters."""
    leaves, treedef = jax.tree.flatten(params)
    values = [np.float32(scale) * sharded.normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return treedef.unflatten([jax.device_put(v, leaf.sharding) for v, leaf in zip(values, leaves, strict=True)])


def numpy(tree):
    return jax.tree.map(np.array, tree)
