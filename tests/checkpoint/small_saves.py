"""Checkpoints of one small array, and a full disk."""

import errno

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from shardformer import checkpoint
from tests.checkpoint import places


def save(out, step, value, size=4):
    return checkpoint.save(out, step, {"x": jnp.full(size, value, jnp.float32)}, {"progress.json": f"{value}"})


def value_of(folder, size=4):
    here = SingleDeviceSharding(jax.devices()[0])
    (x,) = jax.tree.leaves(checkpoint.restore(folder, {"x": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here)}))
    assert checkpoint.read_document(folder, "progress.json") == f"{int(x[0])}"
    return int(x[0])


def shown(out):
    return sorted(places.names_in(out))


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")
