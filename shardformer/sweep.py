"""A sweep: an ordinary run for each combination of some keys' values and each seed; the worse half may stop early.

What is left to do follows from the runs' folders. So the same command continues a sweep, and processes on one disk
share its runs, such as the tasks of a SLURM array. A run that fails is tried once by each process.
"""

import dataclasses
import itertools
import math
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from shardformer import checkpoint, storage
from shardformer.checkpoint import FolderTaken
from shardformer.config import FIELDS, LAUNCH_ONLY_KEYS, Config
from shardformer.config.keys import format_value
from shardformer.config.registries import names_code
from shardformer.errors import RunError, UsageError
from shardformer.logs.csv_file import MAX_ROWS
from shardformer.logs.metrics_file import read_metrics
from shardformer.messages import log
from shardformer.session import Session
from shardformer.tables import format_count
from shardformer.training.stop_signal import StopSignal

POLL_SECONDS = 2.0  # between two looks at runs of other processes


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination of values, with a run for each seed."""

    values: dict[str, object]
    runs: tuple[Config, ...]

    @property
    def shown(self) -> dict[str, str]:
        """The values as the command line takes them."""
        return {key: format_value(FIELDS[key], value) for key, value in self.values.items()}

    @property
    def folders(self) -> list[Path]:
        """The records of its runs that have begun, on this machine."""
        folders = [storage.read_records(storage.location(run.run.out)) for run in self.runs]
        return [folder for folder in folders if (folder / "metrics.csv").is_file()]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.shown.items()) or "the preset"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a setting has reached."""

    setting: Setting
    step: int  # at which all of its seeds were compared last
    losses: list[float]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the seeds; None for one seed, or if one has failed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.loss) else None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings of a sweep. After 1/2^halvings of the steps, ..., 1/4 and 1/2, only the better half goes on."""

    settings: tuple[Setting, ...]
    halvings: int
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # by folder, the errors of this process's runs

    @staticmethod
    def of(config: Config, swept: dict[str, list], seeds: int, halvings: int) -> "Sweep":
        """Returns the sweep of every combination of the swept values, in folders in the `out` of `config`."""
        settings = []
        for values in itertools.product(*swept.values()):
            given = dict(zip(swept, values, strict=True))
            runs = [given | {"seed": config.training.seed + number} for number in range(seeds)]
            settings.append(
                Setting(given, tuple(config.override(keys | {"out": _folder(config, keys)}) for keys in runs))
            )
        sweep = Sweep(tuple(settings), halvings)
        for setting in settings:
            sweep.check(setting.runs[0])
        return sweep

    def check(self, config: Config) -> None:
        """Rejects a run that is not evaluated where it may stop, and steps that only the data would count."""
        if config.training.epochs:
            raise UsageError(f"a sweep compares runs by steps, got epochs={config.training.epochs:g}; give steps=")
        ends, every = [self.end(config, halving) for halving in range(self.halvings + 1)], config.run.eval_every
        if ends[-1] < every or len({*ends}) < len(ends):
            raise UsageError(
                f"halvings={self.halvings} compares runs after 1/{2**self.halvings} of steps={config.training.steps}, "
                f"but eval_every={every}; give an eval_every of at most {config.training.steps // 2**self.halvings}"
            )

    def end(self, config: Config, halving: int) -> int:
        """Returns the step at which a run is compared before `halving` more of them: its last one for 0."""
        steps, every = config.training.steps, config.run.eval_every
        return steps if halving == 0 else steps // 2**halving // every * every

    def find_pending(self) -> tuple[int, list[Config]]:
        """Returns the runs to train next, and how many halvings follow; no runs if the sweep is complete."""
        for halving, settings in self.rounds():
            pending = [run for setting in settings for run in setting.runs if self.read_loss(run, halving) is None]
            if pending:
                return halving, pending
        return 0, []

    def rounds(self) -> Iterator[tuple[int, Sequence[Setting]]]:
        """Yields how many halvings follow and the settings that are still trained then."""
        settings: Sequence[Setting] = self.settings
        for halving in range(self.halvings, -1, -1):
            yield halving, settings
            settings = self.rank(settings, halving)[: -(-len(settings) // 2)]

    def rank(self, settings: Sequence[Setting], halving: int) -> list[Setting]:
        """Returns the settings by the mean loss of their seeds, the best first."""
        return sorted(settings, key=lambda setting: statistics.fmean(self.losses(setting, halving)))

    def results(self) -> list[Result]:
        """Returns the settings that were compared: those that came further first, then those of a lower loss.

        Those with a failed run come last.
        """
        results = []
        for setting in self.settings:
            for halving in range(self.halvings + 1):
                if all(self.read_loss(run, halving) is not None for run in setting.runs):
                    step = self.end(setting.runs[0], halving)
                    results.append(Result(setting, step, self.losses(setting, halving)))
                    break
        return sorted(results, key=lambda result: (math.isinf(result.loss), -result.step, result.loss))

    def losses(self, setting: Setting, halving: int) -> list[float]:
        """Returns the loss of each seed; infinity for one that has failed or has not come so far."""
        losses = (self.read_loss(run, halving) for run in setting.runs)
        return [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]

    def read_loss(self, config: Config, halving: int) -> float | None:
        """Returns the lowest validation loss up to a comparison; None for a run that is not there yet."""
        folder, end = storage.location(config.run.out), self.end(config, halving)
        if (folder / "metrics.csv").is_file():
            series = read_metrics(storage.read_records(folder), MAX_ROWS)
            pairs = zip(series["step"], series["val_loss"], strict=True)
            evaluated = [(step, loss) for step, loss in pairs if step is not None and loss is not None]
            if max((step for step, _ in evaluated), default=0) >= end:
                return min(loss for step, loss in evaluated if step <= end)
        return math.inf if config.run.out in self.failed else None

    def train(self) -> bool:
        """Trains what is left, until a stop or the end of the sweep; returns whether it is complete."""
        for setting in self.settings:
            for config in setting.runs:
                _check_unchanged(config)
        waits = False
        while True:
            halving, pending = self.find_pending()
            if not pending:
                return True
            for config in pending:
                try:
                    if not self.train_one(config, halving, len(pending)):
                        return False
                except FolderTaken as taken:
                    reason = taken
                    continue
                except RunError as error:
                    self.failed[config.run.out] = str(error)
                    log.warning(f"{config.run.out} failed, and counts as the worst: {error}")
                waits = False
                break
            else:
                if not waits:
                    log.info(f"waiting for {format_count(len(pending), 'run')} of other processes: {reason}")
                waits = True
                time.sleep(POLL_SECONDS)

    def train_one(self, config: Config, halving: int, left: int) -> bool:
        """Trains a run up to its next comparison; returns False if a signal has stopped it before."""
        end = self.end(config, halving)
        log.info(f"\n{config.run.out}: to step {end} of {config.training.steps}; {left} left to go so far")
        session = _open(config)
        with StopSignal() as stop:
            trained = session.train(stop, _StopAt(end, stop) if end < config.training.steps else None)
        jax.clear_caches()  # else the programs of all runs would stay in memory
        if trained.stopped and stop.name != _StopAt.name:
            return False
        if self.read_loss(config, halving) is None:
            raise UsageError(f"{config.run.out} has no validation loss, by which a sweep compares; give its data some")
        return True


class _StopAt:
    """An observer of a run that stops it at a step, as a signal would."""

    name = "halving"

    def __init__(self, step: int, stop: StopSignal):
        self._step, self._stop = step, stop

    def write(self, row: dict) -> None:
        if row["step"] >= self._step:
            self._stop.request(self.name)

    def close(self) -> None:
        pass


def _folder(config: Config, values: dict) -> str:
    words = [f"{key}-{format_value(FIELDS[key], value)}" for key, value in values.items()]
    return str(storage.location(config.run.out) / re.sub(r"[^\w.+-]", "-", "_".join(words)))


def _open(config: Config) -> Session:
    folder = storage.location(config.run.out)
    if not (folder / "config.json").is_file():
        return Session.create(config)
    with checkpoint.lock_folder(folder):
        pass  # no other process trains it, so its files are complete
    code = [name for name in FIELDS if names_code(config.get(name)) and name not in LAUNCH_ONLY_KEYS]
    return Session.resume(folder, **{name: config.get(name) for name in (*LAUNCH_ONLY_KEYS, *code)})


def _check_unchanged(config: Config) -> None:
    """Rejects a run that was begun with other keys: the losses would not be comparable."""
    folder = storage.location(config.run.out)
    if (folder / "config.json").is_file():
        stored = checkpoint.read_config(storage.read_records(folder))
        same = config.replace(**{name: stored.get(name) for name in _settled(config)})
        if changes := same.describe_changes(stored):
            raise UsageError(f"{folder} was trained with other keys ({changes}); give the sweep another out=")


def _settled(config: Config) -> list[str]:
    """Returns the keys that a run settles at its start: the mesh, what is auto, and the rows of conversations."""
    of_rows = [name for name in ("documents", "mask_prompt") if config.get(name) == FIELDS[name].default]
    return ["vocab", "mesh", *of_rows, *(name for name in FIELDS if config.shown(name) == "auto")]
