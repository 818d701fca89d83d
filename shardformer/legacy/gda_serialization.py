"""`jax.experimental.gda_serialization.serialization`: array_serialization, also with meshes and specs for shardings."""

import importlib
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

_SAME = {
    "GlobalAsyncCheckpointManager", "GlobalAsyncCheckpointManagerBase", "TS_CONTEXT", "async_serialize",
    "get_tensorstore_spec", "run_serialization",
}  # fmt: skip


def __getattr__(name: str):
    if name not in _SAME:
        raise AttributeError(f"gda_serialization has no attribute {name!r}")
    try:
        return getattr(_today(), name)
    except ImportError as error:
        raise AttributeError(f"gda_serialization.{name} needs another package: {error}") from error


def run_deserialization(shardings: Sequence, *args, **kwargs) -> list[jax.Array]:
    """Reads arrays: from (shardings, tensorstore_specs, ...), or (meshes, mesh_axes, tensorstore_specs, ...)."""
    if shardings and isinstance(shardings[0], Mesh):
        mesh_axes, args = args[0], args[1:]
        shardings = [NamedSharding(mesh, axes) for mesh, axes in zip(shardings, mesh_axes, strict=True)]
    return _today().run_deserialization(shardings, *args, **kwargs)


def async_deserialize(sharding, *args, **kwargs):
    """Returns the coroutine that reads an array: from (sharding, spec, ...), or (mesh, mesh_axes, spec, ...)."""
    if isinstance(sharding, Mesh):
        sharding, args = NamedSharding(sharding, args[0]), args[1:]
    return _today().async_deserialize(sharding, *args, **kwargs)


def _today():
    """Imports tensorstore, so only at its first use."""
    return importlib.import_module("jax.experimental.array_serialization.serialization")
