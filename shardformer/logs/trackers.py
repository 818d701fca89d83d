"""The tracker that `tracker=` names: one of four by its own package, or a `module:function` of the user.

A tracker of a package continues its run after a resume: `tracker.json` in the run folder has the run's identity there.
"""

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shardformer.config import Config
from shardformer.devices import processes
from shardformer.errors import UsageError, forbid_exit
from shardformer.files import read_text, replacing
from shardformer.logs.events import TAGS
from shardformer.logs.observers import Observer, Observers
from shardformer.messages import is_first_process

FILE = "tracker.json"  # {tracker: identity}
FINISH_SECONDS = 60  # of a package at the end of a run; MLflow's first start creates a database, which took 15 s
IDENTITY = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a stranger's run could have a path


class Client(Protocol):
    """A run in a tracker's package. `identity` names it there; None starts a new one.

    It is created, written to and closed in one thread, as MLflow's active run belongs to a thread.
    """

    identity: str

    def __init__(self, name: str, settings: dict[str, Any], identity: str | None): ...

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class Wandb:
    def __init__(self, name: str, settings: dict[str, Any], identity: str | None):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardformer"),
            id=identity,
            resume="allow",
            name=name,
            config=settings,
            allow_val_change=True,  # a resume may change keys
            reinit="create_new",  # leaves a notebook's own run open
            settings={"console": "off"},  # the terminal shows a live display, which is no log
        )
        self.identity = self._run.id

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow:
    def __init__(self, name: str, settings: dict[str, Any], identity: str | None):
        import mlflow

        self._mlflow = mlflow
        run = mlflow.start_run(run_id=identity, run_name=None if identity else name)
        self.identity = run.info.run_id
        if not identity:  # a parameter cannot be logged with another value later
            mlflow.log_params(settings)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class Aim:
    def __init__(self, name: str, settings: dict[str, Any], identity: str | None):
        import aim

        # As in `Wandb`, the terminal's live display is left out.
        self._run = aim.Run(run_hash=identity, experiment="shardformer", capture_terminal_logs=False)
        self._run.name = name
        self._run["config"] = settings
        self.identity = self._run.hash

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def close(self, failed: bool) -> None:
        self._run["status"] = "failed" if failed else "finished"  # Aim has no status of its own
        self._run.close()


CLIENTS: dict[str, type[Client]] = {"wandb": Wandb, "mlflow": Mlflow, "aim": Aim}


class PackageTracker:
    """The observer that reports rows to the run of a tracker's package, under the names of TensorBoard's charts."""

    def __init__(self, tracker: str, folder: Path, settings: dict[str, Any], new: bool):
        identities = {} if new else read_identities(folder)
        plain = {key: _to_plain(value) for key, value in settings.items()}
        name = settings["out"].rstrip("/").rpartition("/")[2]
        self._client = CLIENTS[tracker](name, plain, identities.get(tracker))
        with replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(identities | {tracker: self._client.identity}) + "\n")

    def write(self, row: dict) -> None:
        values = {TAGS.get(key, key): value for key, value in row.items() if key != "step" and value is not None}
        self._client.log(row["step"], values)

    def close(self) -> None:
        self._client.close(failed=False)

    def close_failed(self) -> None:
        self._client.close(failed=True)


def read_identities(folder: Path) -> dict[str, str]:
    """Returns the valid identities in a run's tracker.json, by tracker; none if the file cannot be read."""
    try:
        stored = json.loads(read_text(folder / FILE))
        return {key: text for key, text in stored.items() if isinstance(text, str) and IDENTITY.fullmatch(text)}
    except (OSError, ValueError, AttributeError):
        return {}


def _to_plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def starts_here(config: Config) -> bool:
    """Returns False for a process that is not the first. The processes need not have joined yet."""
    membership = processes.find_membership(config)
    return is_first_process() and (membership is None or membership.process_id == 0)


def check_tracker(tracker: str) -> None:
    """Raises UsageError for a tracker whose package or function cannot be imported, before a run starts."""
    if ":" in tracker:
        import_tracker(tracker)
    elif tracker in CLIENTS:
        found = importlib.util.find_spec(tracker)
        if not found or not found.origin:  # a folder of the tracker's own runs, such as ./wandb, is no package
            raise UsageError(f"tracker={tracker} needs its package, which is not installed: pip install {tracker}")
        if tracker == "wandb":
            _log_in_to_wandb()


def _log_in_to_wandb() -> None:
    """Logs in before the run starts: an observer's thread would ask for a key behind the display."""
    try:
        import wandb

        wandb.login(verify=False)  # which returns at once with WANDB_MODE=offline or disabled
    except Exception as error:
        raise UsageError(f"tracker=wandb: {error}; without an account: WANDB_MODE=offline") from None


def start_tracker(observers: Observers, tracker: str, folder: Path, settings: dict[str, Any], new: bool) -> None:
    """Starts the observer of `tracker=` for the run in a folder; TensorBoard's is always there."""
    if ":" in tracker:
        function = import_tracker(tracker)
        observers.start(tracker, lambda: function(settings))
    elif tracker in CLIENTS:
        observers.start(tracker, lambda: PackageTracker(tracker, folder, settings, new), FINISH_SECONDS)


def import_tracker(location: str) -> Callable[[dict], Observer]:
    """Returns the function of `tracker=module:function`; raises UsageError for a name that cannot be imported."""
    module, _, name = location.partition(":")
    try:
        with forbid_exit("its module"):
            function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module may raise anything
        why = str(error) or type(error).__name__
        raise UsageError(f"tracker={location} cannot be imported: {why}; is its folder on PYTHONPATH?") from None
    if not callable(function):
        raise UsageError(f"tracker={location} is a {type(function).__name__}; name a function or a class")
    return function
