"""Statistics of the batch of each logged step, in a csv file of the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardformer.devices import programs
from shardformer.logs.csv_file import CsvFile, Row
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.outputs import Outputs
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState


class StatisticsFile:
    """A csv file, opened by the first write, which knows the columns. On resume it continues after `first_step`."""

    derived: tuple[str, ...] = ()  # columns that `derive` adds

    def __init__(self, path: Path, first_step: int):
        self._path, self._first_step = path, first_step
        self._file: CsvFile | None = None

    def write(self, step: int, values: dict[str, float]) -> None:
        if self._file is None:
            file = CsvFile(self._path, ("step", *values, *self.derived))
            for row in file.begin(self._first_step):
                self.derive(row)
            self._file = file
        self._file.append({"step": step, **values, **self.derive(values)})

    def derive(self, row: Row | dict[str, float]) -> Row:
        """Returns further columns of a row. They may depend on the rows before it: each row comes once."""
        return {}


class StepStatistics(HostFeature):
    """A program that measures the batch of each logged step before the step, and the file of its results."""

    file_name: str
    file_class = StatisticsFile

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        self._trainer, self.update = evaluator.trainer, evaluator.trainer.update
        self._program = programs.jit(self.measure, out_shardings=self.update.model.sharding(P()))

    def open(self, run: Run, first_step: int) -> None:
        self._file = None if jax.process_index() else self.file_class(run.records / self.file_name, first_step)

    def before_logged_step(self, state: TrainState, batch: Any, step: int, outputs: Outputs) -> None:
        jax.block_until_ready(state)  # the steps in flight are training: their time counts
        with outputs.throughput.pause():
            values = self.read(state, self._trainer.place_batch(state, batch, step - 1))
        if file := self._file:
            outputs.checkpoints.try_to_write(lambda: file.write(step, values))

    def read(self, state: TrainState, batch: dict[str, jax.Array]) -> dict[str, float]:
        """Returns the statistics of a batch on the devices, for the next step of `state`; waits."""
        return self.describe(self._program(state, batch))

    def measure(self, state: TrainState, batch: dict[str, jax.Array]) -> Any:
        """Returns the arrays from which `describe` makes the statistics. It is compiled."""
        raise NotImplementedError

    def describe(self, measured: Any) -> dict[str, float]:
        """Returns the statistics by column."""
        raise NotImplementedError
