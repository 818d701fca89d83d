"""Sharded transformer language models in Haiku, under `jax.shard_map`, on today's JAX."""

import importlib

from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.errors import RunError, UsageError

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Model",
    "OwnBatches",
    "RunError",
    "Session",
    "Task",
    "Trainer",
    "UsageError",
    "load_corpus",
    "preset",
    "verify_function",
    "xmap",
]

# Imported at their first use, because commands set JAX's environment before they import it.
LAZY = {
    "Model": "model",
    "OwnBatches": "data.own_batches",
    "Session": "session",
    "Task": "model.task",
    "Trainer": "training.trainer",
    "load_corpus": "data",
    "verify_function": "analysis.shard_check",
    "xmap": "legacy",
}


def __getattr__(name: str):
    if name in LAZY:
        return getattr(importlib.import_module(f"shardformer.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names that a notebook completes, with those that are imported at their first use."""
    return sorted({*globals(), *LAZY})
