"""Trackers of a run: any `module:function`, and Weights & Biases. Both are observers."""

import importlib
import json
from pathlib import Path

from shardformer.errors import UsageError


def import_tracker(place: str):
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
