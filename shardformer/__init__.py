"""Sharded transformer language models in Haiku, under `jax.shard_map`, on today's JAX.

The names of `__all__` are public: their meaning changes only with a line in the changelog. Everything else is internal.
"""

import importlib
from typing import TYPE_CHECKING

from shardformer.cli.commands import run_command
from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.errors import RunError, UsageError

if TYPE_CHECKING:  # for editors and type checkers: at run time, LAZY imports them
    from shardformer import exact
    from shardformer.analysis.shard_check import verify_function
    from shardformer.data import load_corpus
    from shardformer.data.own_batches import OwnBatches
    from shardformer.inference import Generator, Sampling
    from shardformer.kernels.activations import ACTIVATIONS
    from shardformer.legacy import xmap
    from shardformer.model import Model
    from shardformer.model.task import Task
    from shardformer.optim.optimizers import OPTIMIZERS
    from shardformer.optim.schedule import SCHEDULES
    from shardformer.session import Session, Trained
    from shardformer.shards.norm import NORMS
    from shardformer.shards.positions import POSITIONS
    from shardformer.training.trainer import Trainer

__version__ = "0.2.0"
__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "OPTIMIZERS",
    "POSITIONS",
    "SCHEDULES",
    "Config",
    "Generator",
    "Model",
    "OwnBatches",
    "RunError",
    "Sampling",
    "Session",
    "Task",
    "Trained",
    "Trainer",
    "UsageError",
    "exact",
    "load_corpus",
    "preset",
    "run_command",
    "verify_function",
    "xmap",
]

# Imported at their first use, because commands set JAX's environment before they import it.
LAZY = {
    "ACTIVATIONS": "kernels.activations",
    "Generator": "inference",
    "Model": "model",
    "NORMS": "shards.norm",
    "OPTIMIZERS": "optim.optimizers",
    "OwnBatches": "data.own_batches",
    "POSITIONS": "shards.positions",
    "SCHEDULES": "optim.schedule",
    "Sampling": "inference",
    "Session": "session",
    "Task": "model.task",
    "Trained": "session",
    "Trainer": "training.trainer",
    "exact": "exact",
    "load_corpus": "data",
    "verify_function": "analysis.shard_check",
    "xmap": "legacy",
}


def __getattr__(name: str):
    if name in LAZY:
        module = importlib.import_module(f"shardformer.{LAZY[name]}")
        return module if name == LAZY[name] else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names that a notebook completes, with those that are imported at their first use."""
    return sorted({*globals(), *LAZY})
