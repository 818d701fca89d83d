"""Checkpoints: `OUT/step_00000040/` contains arrays, `tree.pkl`, `manifest.json` and documents, or does not exist."""

from shardformer.checkpoint.documents import describe_no_run, read_config, read_document
from shardformer.checkpoint.folders import list_steps, newest_step_folder, prune, set_aside, step_folder
from shardformer.checkpoint.restoring import StoredLeaf, keep_as_read, restore, verify
from shardformer.checkpoint.saver import Saver, save, save_snapshot
from shardformer.checkpoint.snapshot import Snapshot, take_snapshot
from shardformer.checkpoint.store import Damaged, FolderLost, FolderTaken, Lock
from shardformer.checkpoint.stores import lock_folder

__all__ = [
    "Damaged",
    "FolderLost",
    "FolderTaken",
    "Lock",
    "Saver",
    "Snapshot",
    "StoredLeaf",
    "describe_no_run",
    "keep_as_read",
    "list_steps",
    "lock_folder",
    "newest_step_folder",
    "prune",
    "read_config",
    "read_document",
    "restore",
    "save",
    "save_snapshot",
    "set_aside",
    "step_folder",
    "take_snapshot",
    "verify",
]
