"""Checkpoints: `OUT/step_00000040/` holds arrays, `tree.pkl`, `manifest.json` and documents, whole or not at all."""

from shardformer.checkpoint.damage import Damaged
from shardformer.checkpoint.documents import document
from shardformer.checkpoint.folders import folder, latest, prune, set_aside, steps
from shardformer.checkpoint.lock import FolderLost, RunLock
from shardformer.checkpoint.restoring import restore, verify
from shardformer.checkpoint.saver import Saver, save
from shardformer.checkpoint.snapshot import Snapshot, take

__all__ = ["Damaged", "FolderLost", "RunLock", "Saver", "Snapshot", "document", "folder", "latest", "prune"]
__all__ += ["restore", "save", "set_aside", "steps", "take", "verify"]
