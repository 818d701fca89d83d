"""Runs of the command line in this process; runs of one configuration share their compiled functions."""

import contextlib
import csv
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from shardformer import preset, session
from shardformer.__main__ import main
from shardformer.cli.train_command import FinalSample
from shardformer.config import FIELDS, LAUNCH_ONLY_KEYS, RunKeys, key_names
from shardformer.data import builtin
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer

USAGE, FAILED = 2, 1  # exit statuses
RUN_FOLDER = key_names(RunKeys)
TIMINGS = {"peak_bytes", "tokens_per_s", "mfu", "save_s", "elapsed_s", "data_s"}


def text(folder: Path, characters: int = 20_000) -> Path:
    """Writes a corpus that is evaluated in a moment; returns its path."""
    path = folder / "text.txt"
    path.write_text(builtin.text()[:characters], encoding="utf-8")
    return path


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train(*words, stop_after=0, act: Callable[[], object] = terminate, sample=False, curves=False) -> int:
    """Runs `shardformer train ...` and calls `act` during step `stop_after`.

    The sample would compile another program, and the curves take longer than the steps of most runs.
    A short run of `tiny` has the schedule of a full one, so that runs of any length share their programs.
    """
    given = dict(str(word).split("=", 1) for word in words if "=" in str(word))
    if "tiny" in words and "decay_steps" not in given and int(given.get("steps", 0)) < preset("tiny").training.steps:
        words = (*words, f"decay_steps={preset('tiny').training.steps}")
    with contextlib.ExitStack() as stack:
        shared_trainer = functools.partial(_SharedTrainer, stop_after, act)
        stack.enter_context(mock.patch.object(session, "Trainer", shared_trainer))
        stack.enter_context(mock.patch.object(session, "warn_of_compiler"))  # no command prints it
        if not sample:
            stack.enter_context(mock.patch.object(FinalSample, "write", return_value="(no sample)"))
            stack.enter_context(mock.patch.object(FinalSample, "compile"))
        if not curves:
            stack.enter_context(mock.patch.object(session, "draw_curves"))
        return main(["train", *map(str, words)])


def rows(out: Path) -> list[dict[str, str]]:
    """Returns the rows of metrics.csv as text, without the columns that depend on a clock."""
    with open(out / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMINGS} for row in csv.DictReader(file)]


def share_trainers(monkeypatch) -> None:
    """Lets sessions of one configuration share their compiled functions, as runs of `train` do."""
    monkeypatch.setattr(session, "Trainer", functools.partial(_SharedTrainer, 0, terminate))


class _SharedTrainer:
    """A Trainer compiled once for all runs of a configuration, which calls a function at one step."""

    def __init__(self, stop_after: int, act: Callable[[], object], config, mesh):
        self._trainer = trainer(config)
        self.config = config
        self._stop_after, self._act = stop_after, act

    def step(self, state, batch, step):
        if step + 1 == self._stop_after:
            self._act()
        return self._trainer.step(state, batch, step)

    def __getattr__(self, name):
        return getattr(self._trainer, name)


def trainer(config) -> Trainer:
    """Returns one trainer for all configurations whose steps compute the same."""
    names = {"data", "base", "steps", *RUN_FOLDER, *LAUNCH_ONLY_KEYS} - {"task"}
    beside = {name: FIELDS[name].default for name in names}
    return _compiled_once(config.replace(**beside, decay_steps=config.optimizer.decay_steps or config.training.steps))


@functools.cache
def _compiled_once(config) -> Trainer:
    return Trainer(config, mesh.make(config))
