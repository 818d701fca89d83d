"""The progress.json of a checkpoint, and the checkpoints that a run may go back to.

progress.json has the step, the best step so far, and an interrupted evaluation. The checkpoints to go back to depend on
the step only, so that a resumed run chooses the same ones.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardformer import checkpoint
from shardformer.config import Config
from shardformer.config.training_keys import SKIP_LIMIT
from shardformer.storage import BucketPath


class Best(NamedTuple):
    """The checkpoint with the lowest validation loss so far."""

    step: int = 0
    val_loss: float = float("inf")

    def is_better_than(self, other: "Best") -> bool:
        """Returns whether the loss is lower. The loss of float weights says nothing about the codes of a run."""
        if type(self) is not type(other):
            return isinstance(self, RoundedBest) and math.isfinite(self.val_loss)
        return self.val_loss < other.val_loss


class RoundedBest(Best):
    """The same, where the loss is that of weights with the values of codes."""


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
        kind = RoundedBest if best.get("rounded") else Best
        best = kind(int(best["step"]), float(best["val_loss"]))
        if math.isnan(best.val_loss):  # no loss would ever be lower
            raise ValueError("val_loss is nan")
        if (unevaluated := progress.get("unevaluated")) is not None and unevaluated["step"] != step:
            raise ValueError("unevaluated names another step")
        return CheckpointProgress(step, best, unevaluated)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise checkpoint.Damaged(f"{folder / 'progress.json'} is damaged ({type(error).__name__}: {error})") from None


def is_scheduled(step: int, config: Config) -> bool:
    """Returns whether a checkpoint of this step is due by its number."""
    return any(every and step % every == 0 for every in (config.run.save_every, config.run.keep_every))


def select_earlier(steps: Iterable[int], before: int, config: Config) -> list[int]:
    """Returns the steps with a checkpoint by schedule before a step, the newest first."""
    return sorted((step for step in steps if step < before and is_scheduled(step, config)), reverse=True)


def select_needed(steps: list[int], config: Config) -> set[int]:
    """Returns the steps that a run at the newest step, or later, may go back to."""
    if not config.bad_steps.skip_steps or not steps:
        return set()
    oldest = select_earlier(steps, steps[-1] - SKIP_LIMIT, config)[:1] or [0]
    return {step for step in steps if step >= oldest[0] and is_scheduled(step, config)}
