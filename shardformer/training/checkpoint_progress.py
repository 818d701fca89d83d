"""The progress.json of a checkpoint: its step, the best step so far, and an interrupted evaluation."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from shardformer import checkpoint
from shardformer.storage import BucketPath


class Best(NamedTuple):
    """The checkpoint with the lowest validation loss so far."""

    step: int = 0
    val_loss: float = float("inf")


class CheckpointProgress(NamedTuple):
    """The content of a checkpoint's progress.json."""

    step: int
    best: Best
    unevaluated: dict | None = None  # the metrics of the step, if a stop interrupted its evaluation


def read_progress(folder: Path | BucketPath) -> CheckpointProgress:
    """Reads a checkpoint's progress.json."""
    try:
        progress = json.loads(checkpoint.read_document(folder, "progress.json"))
        step, best = int(progress["step"]), progress["best"]
        best = Best(int(best["step"]), float(best["val_loss"]))
        if math.isnan(best.val_loss):  # no loss would ever be lower
            raise ValueError("val_loss is nan")
        unevaluated = progress.get("unevaluated")
        if unevaluated is not None and unevaluated["step"] != step:
            raise ValueError("unevaluated names another step")
        return CheckpointProgress(step, best, unevaluated)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise checkpoint.Damaged(f"{folder / 'progress.json'} is damaged ({type(error).__name__}: {error})") from None
