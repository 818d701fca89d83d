"""The files, displays and trackers that a run in training writes to."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import jax

from shardformer import messages
from shardformer.checkpoint import Lock
from shardformer.config import FIELDS, Config, parsing
from shardformer.devices import processes
from shardformer.devices.chips import Chip, find_chip
from shardformer.errors import RunError
from shardformer.logs import goodput, metrics_file
from shardformer.logs.csv_file import CsvFile
from shardformer.logs.events import TensorBoardEvents
from shardformer.logs.observers import Observer, Observers
from shardformer.logs.progress import NoProgress, Progress
from shardformer.logs.step_profiler import StepProfiler
from shardformer.logs.throughput import Throughput, measure_peak_bytes
from shardformer.model import flops
from shardformer.training.checkpoint_progress import Best
from shardformer.training.run_folder import Run
from shardformer.training.saving import RunCheckpoints


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The open outputs. Only the first process writes files and shows progress."""

    metrics: CsvFile | None
    progress: NoProgress
    observers: Observers
    profiler: StepProfiler
    checkpoints: RunCheckpoints
    throughput: Throughput
    peak_speed: float | None  # tokens per second at an MFU of 1; None for an unknown chip

    def write_row(self, row: dict) -> None:
        """Writes the metrics of a logged step, with the speed and the memory measured now."""
        speed = self.throughput.measure(row["step"])
        row |= {
            "tokens_per_s": speed,
            "mfu": speed / self.peak_speed if speed and self.peak_speed else None,
            "save_s": goodput.CLOCK.take("save") or None,
            "data_s": goodput.CLOCK.take("data"),
            "elapsed_s": self.throughput.elapsed(),
            "peak_bytes": measure_peak_bytes(),
        }
        if metrics := self.metrics:

            def write() -> None:
                metrics.append(row)
                goodput.CLOCK.write(row["step"])

            self.checkpoints.try_to_write(write)
            messages.log_step(row)
        self.observers.write(row)
        self.progress.show_row(row, self.checkpoints.best)


@contextlib.contextmanager
def open_outputs(
    run: Run,
    best: Best,
    first_step: int,
    lock: Lock | None = None,
    last_row: int | None = None,
    sink: Observer | None = None,
    details: tuple[str, ...] = (),
) -> Iterator[Outputs]:
    """Opens the outputs of a run that continues from `first_step`; closes them at the end of the block.

    Rows of metrics.csv after the step `last_row` are dropped; by default, those after `first_step`. If one process
    fails to open an output, all processes raise. `details` are the metrics that only this task has.
    """
    last_row = first_step if last_row is None else last_row
    with contextlib.ExitStack() as stack:
        arguments = run, best, first_step, lock, last_row, sink, details
        yield processes.succeed_or_fail_together(lambda: _open(stack, *arguments))


def _open(
    stack: contextlib.ExitStack,
    run: Run,
    best: Best,
    first_step: int,
    lock: Lock | None,
    last_row: int,
    sink: Observer | None,
    details: tuple[str, ...],
) -> Outputs:
    c, is_first_process = run.config, jax.process_index() == 0
    metrics, elapsed_before = None, 0.0
    if is_first_process:
        metrics = metrics_file.open_metrics_file(run.records, details)
        elapsed_before = metrics_file.find_elapsed_seconds(metrics.begin(last_row))
        goodput.CLOCK.continue_file(run.records, first_step)
        stack.callback(_flush, metrics)
    chip = find_chip(jax.devices()[0].device_kind)
    progress = stack.enter_context(_make_progress(c, first_step, elapsed_before, best, chip, details))
    stack.enter_context(messages.printed_by(progress.show_message))
    observers = stack.enter_context(Observers())
    if is_first_process:
        _start_observers(observers, run, sink, is_new=first_step == 0)
    steps = parsing.parse_steps_range("profile", c.start.profile) if is_first_process else None
    return Outputs(
        metrics=metrics,
        progress=progress,
        observers=observers,
        profiler=stack.enter_context(StepProfiler(steps, run.records / "profile")),
        checkpoints=stack.enter_context(RunCheckpoints(run, best, lock)),
        throughput=Throughput(c.tokens_per_step, first_step, elapsed_before),
        peak_speed=flops.peak_tokens_per_second(c, chip) if chip else None,
    )


def _make_progress(
    c: Config, first_step: int, elapsed_before: float, best: Best, chip: Chip | None, details: tuple[str, ...]
) -> NoProgress:
    if jax.process_index() or not messages.log.isEnabledFor(logging.INFO):
        return NoProgress()
    return Progress(
        c.training.steps,
        first_step,
        c.tokens_per_step,
        elapsed_before,
        best=best,
        with_mfu=bool(chip),
        metrics=details,
        unit=c.objective.unit,
    )


def _start_observers(observers: Observers, run: Run, sink: Observer | None, is_new: bool) -> None:
    c = run.config
    settings = {name: c.get(name) for name in FIELDS}
    observers.start("TensorBoard", lambda: TensorBoardEvents(run.records / "tensorboard", new=is_new))
    if c.start.tracker:
        from shardformer.logs.trackers import start_tracker  # not imported without a tracker

        start_tracker(observers, c.start.tracker, run.records, settings, new=is_new)
    if sink:
        observers.start("the sink of metrics", lambda: sink)


def _flush(metrics: CsvFile) -> None:
    with contextlib.suppress(RunError):  # the row that could not be written was reported
        metrics.flush()
