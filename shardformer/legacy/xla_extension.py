"""jaxlib's extension module under its old names, `jax.interpreters.xla.xe` too, with types that programs ask for."""

import types

import jax
from jax.tree_util import PyTreeDef  # noqa: F401  # the names of the old module
from jaxlib import xla_client

from shardformer.legacy.pmapped_arguments import PjitFunction

Array = ArrayImpl = Buffer = DeviceArray = jax.Array
Device = jax.Device
NamedSharding, Sharding = jax.sharding.NamedSharding, jax.sharding.Sharding
HloSharding, OpSharding = xla_client.HloSharding, xla_client.OpSharding
XlaRuntimeError = jax.errors.JaxRuntimeError
CompiledFunction = PjitFunction


class _PmapFunctionType(type):
    def __instancecheck__(cls, value) -> bool:
        return isinstance(value, types.FunctionType) and hasattr(value, "lower") and hasattr(value, "__wrapped__")


class PmapFunction(metaclass=_PmapFunctionType):
    """The type of a pmapped function, which is a Python function with the method `lower` today."""
