"""Sharded transformer language models in Haiku, under `jax.shard_map`, on today's JAX."""

from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.errors import RunError, UsageError

__version__ = "0.1.0"
__all__ = ["Config", "RunError", "UsageError", "preset", "xmap"]


def __getattr__(name: str):
    if name == "xmap":  # imported when asked for, because the commands set JAX's environment before they import it
        from shardformer.legacy import xmap

        return xmap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
