"""jaxlib's extension module under its old names, `jax.interpreters.xla.xe` too, with types that programs ask for."""

import jax
from jax.tree_util import PyTreeDef  # noqa: F401  # the names of the old module
from jaxlib import xla_client

Array = ArrayImpl = Buffer = DeviceArray = jax.Array
Device = jax.Device
NamedSharding, Sharding = jax.sharding.NamedSharding, jax.sharding.Sharding
HloSharding, OpSharding = xla_client.HloSharding, xla_client.OpSharding
XlaRuntimeError = jax.errors.JaxRuntimeError
CompiledFunction = PjitFunction = type(jax.jit(len))


class PmapFunction:
    """The type of nothing: `jax.pmap` returns a Python function today."""
