"""A small state of every kind of leaf, and where it lies on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardformer.checkpoint import manifest


def here() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def make_mesh(dp: int, mp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: dp * mp]).reshape(dp, mp), ("dp", "mp"))


def place(mesh: Mesh, leaf) -> NamedSharding:
    return NamedSharding(mesh, {2: P("mp"), 3: P(None, "mp", "dp")}.get(len(leaf.shape), P()))


def like(state, sharding_of):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf)), state)


def plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def bits(tree) -> dict:
    """A tree bitwise, a NaN and the sign of a zero included."""
    return {
        name: (leaf.dtype, leaf.shape, np.asarray(plain(leaf)).tobytes())
        for name, leaf in manifest.flatten(tree).items()
    }


def small_state() -> dict:
    return {"half": jnp.ones(3, jnp.bfloat16), "step": jnp.int32(40), "wide": jnp.arange(24.0).reshape(4, 6)}
