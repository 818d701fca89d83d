"""Checkpoints: `OUT/step_00000040/` holds `arrays.npy`, `tree.pkl` and the caller's documents, whole or not at all."""

from shardformer.checkpoint.folders import document, folder, latest, prune, steps
from shardformer.checkpoint.state import restore, save

__all__ = ["document", "folder", "latest", "prune", "restore", "save", "steps"]
