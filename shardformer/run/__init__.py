"""A run on a disk or in a bucket: its configuration, vocabulary, progress, and the states of its checkpoints."""

from shardformer.run.checkpoint_progress import Best, CheckpointProgress
from shardformer.run.run_folder import Run

__all__ = ["Best", "CheckpointProgress", "Run"]
