"""Sharded transformer language models in Haiku, under `jax.shard_map`, on today's JAX."""

from shardformer.config import Config, preset
from shardformer.errors import RunError, UsageError

__all__ = ["Config", "RunError", "UsageError", "preset"]
