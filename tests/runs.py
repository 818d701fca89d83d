"""Runs through the command line, in this process; those of one configuration share their compiled functions."""

import contextlib
import csv
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from shardformer import preset
from shardformer.__main__ import main
from shardformer.cli import train_command
from shardformer.config import FIELDS, LAUNCH_ONLY_KEYS, RunKeys, key_names
from shardformer.data import builtin
from shardformer.parallel import mesh
from shardformer.training.step import Trainer

USAGE, FAILED = 2, 1  # exit statuses
RUN_FOLDER = key_names(RunKeys)
TIMINGS = {"peak_bytes", "tokens_per_s", "mfu", "save_s", "elapsed_s", "data_s"}


def text(folder: Path, characters: int = 20_000) -> Path:
    """A corpus small enough to be evaluated whole in a moment."""
    path = folder / "text.txt"
    path.write_text(builtin.text()[:characters], encoding="utf-8")
    return path


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train(*words, stop_after=0, act: Callable[[], object] = terminate, sample=False, curves=False) -> int:
    """`shardformer train ...`; `act` is done while step `stop_after` runs.

    Without a sample a program less is compiled, and a picture of the curves takes longer than the steps of most runs.
    A short run of `tiny` is the beginning of a whole one, so that runs of any length share their programs.
    """
    given = dict(str(word).split("=", 1) for word in words if "=" in str(word))
    if "tiny" in words and "decay_steps" not in given and int(given.get("steps", 0)) < preset("tiny").steps:
        words = (*words, f"decay_steps={preset('tiny').steps}")
    with contextlib.ExitStack() as stack:
        replace = lambda *what, **by: stack.enter_context(mock.patch.object(train_command, *what, **by))
        replace("Trainer", functools.partial(_SharedTrainer, stop_after, act))
        if not sample:
            replace("sample_text", return_value="(no sample)")
        if not curves:
            replace("draw_curves")
        return main(["train", *map(str, words)])


def rows(out: Path) -> list[dict[str, str]]:
    """metrics.csv as text, without what a clock wrote."""
    with open(out / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMINGS} for row in csv.DictReader(file)]


class _SharedTrainer:
    """A Trainer of the same configuration, compiled once for all runs, that does something at a step."""

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
    """Shared by all configurations whose steps compute the same."""
    beside = {name: FIELDS[name].default for name in ("data", "base", "steps", *RUN_FOLDER, *LAUNCH_ONLY_KEYS)}
    return _compiled_once(config.replace(**beside, decay_steps=config.decay_steps or config.steps))


@functools.cache
def _compiled_once(config) -> Trainer:
    return Trainer(config, mesh.make(config))
