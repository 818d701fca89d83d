"""A run: its folder on a disk or in a bucket, its checkpoints and when they are saved, and the signals that stop it."""

from shardformer.run.checkpoint_progress import Best, CheckpointProgress
from shardformer.run.run_folder import Run

__all__ = ["Best", "CheckpointProgress", "Run"]
