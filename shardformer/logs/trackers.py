"""Trackers of a run: any `module:function`, and Weights & Biases. Both are observers."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.logs.observers import Observer


def check_trackers(config: Config) -> None:
    """Raises UsageError for a tracker that cannot be imported, before a run begins."""
    if config.tracker:
        import_tracker(config.tracker)
    if config.wandb and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UsageError(f"wandb={config.wandb} needs the wandb package, which is not installed; pip install wandb")


def import_tracker(place: str) -> Callable[[dict], Observer]:
    """Returns the function of `tracker=module:function`; raises UsageError for a name that cannot be imported."""
    module, _, name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module may raise anything
        why = str(error) or type(error).__name__
        raise UsageError(f"tracker={place} cannot be imported: {why}; is its folder on PYTHONPATH?") from None
    if not callable(function):
        raise UsageError(f"tracker={place} is a {type(function).__name__}; name a function or a class")
    return function


class WandbTracker:
    """The Weights & Biases tracker. A resumed run continues under the id in OUT/wandb.json."""

    def __init__(self, project: str, out: Path, settings: dict):
        import wandb

        record = out / "wandb.json"
        known = json.loads(record.read_text())["id"] if record.exists() else None
        self._run = wandb.init(
            project=project, name=out.name, id=known, resume="allow", config=settings, dir=str(out), reinit=True
        )
        record.write_text(json.dumps({"id": self._run.id}) + "\n")

    def write(self, row: dict) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
