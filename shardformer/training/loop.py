"""The training loop: batches in, metrics and checkpoints out; however it ends, nothing is lost."""

import contextlib
import dataclasses
import math
import time
from collections import deque

import jax

from shardformer.checkpoint import Lock
from shardformer.config import parsing
from shardformer.distributed import processes
from shardformer.errors import RunError
from shardformer.hardware.chips import find_chip
from shardformer.logs import metrics_file, trackers
from shardformer.logs.events import TensorBoardEvents
from shardformer.logs.gradients_file import GradientsFile
from shardformer.logs.observers import Observers
from shardformer.logs.peak_memory import measure_peak_bytes
from shardformer.logs.progress import NoProgress, Progress
from shardformer.logs.step_profiler import StepProfiler
from shardformer.logs.throughput import Throughput
from shardformer.model import flops
from shardformer.training.evaluation import Evaluation, Evaluator
from shardformer.training.run_folder import Best, Run
from shardformer.training.saving import RunCheckpoints
from shardformer.training.step import IN_FLIGHT, StepMetrics, Trainer, TrainState
from shardformer.training.stop_signal import StopSignal

SLOW_STEP = 0.5  # seconds


class TrainingLoop:
    """Every process runs the same loop; the first one alone writes metrics and shows progress."""

    def __init__(self, run: Run, trainer: Trainer, evaluator: Evaluator, first_step: int, lock: Lock | None = None):
        self.run, self.trainer, self.evaluator, self.first_step = run, trainer, evaluator, first_step
        self.config = trainer.config
        self.lock = lock
        self.batches = evaluator.corpus.train_batches(self.config, first_step, trainer.local_rows)
        self.seconds_without_data = 0.0  # since the last row of metrics.csv

    def train(self, state: TrainState, best: Best, stop: StopSignal) -> tuple[int, Best]:
        """Trains from the state's step to the last, or until it is stopped; returns the step reached and the best."""
        steps = self.config.steps
        with contextlib.ExitStack() as stack:
            processes.succeed_or_fail_together(lambda: self._open(stack, best))
            if self.first_step >= steps:
                self.progress.show_message(f"nothing left to train: the run is at step {self.first_step} of {steps}")
                return self.first_step, best
            pending, settled, in_flight = deque(), time.monotonic(), 1
            for step in range(self.first_step + 1, steps + 1):
                state, metrics = self._dispatch(state, step)
                pending.append((step, metrics))
                self.checkpoints.poll()
                stopping = stop.is_requested(step)
                evaluating = step % self.config.eval_every == 0 or step == steps
                saving = stopping or step == steps or self.checkpoints.is_due(step)
                while len(pending) > (1 if evaluating or saving else in_flight):
                    self._log(self._read(state, *pending.popleft()))
                    before, settled = settled, time.monotonic()
                    in_flight = _choose_steps_in_flight(settled - before)
                if evaluating or saving:
                    self._complete(state, self._read(state, *pending.popleft()), evaluating, saving)
                    settled = time.monotonic()
                if stopping:
                    self.checkpoints.wait(last=True)
                    self.progress.show_message(f"{stop.name or 'preemption'}: stopped after step {step} of {steps}")
                    return step, self.checkpoints.best
        return steps, self.checkpoints.best

    def _open(self, stack: contextlib.ExitStack, best: Best) -> None:
        """Opens what the loop writes to, to be closed by `stack` together with its batches."""
        stack.callback(self.batches.close)
        c, first, is_first_process = self.config, self.first_step, jax.process_index() == 0
        self.metrics = metrics_file.open_metrics_file(self.run.records) if is_first_process else None
        elapsed_before = 0.0
        if self.metrics:
            elapsed_before = metrics_file.find_elapsed_seconds(self.metrics.begin(first))
            stack.callback(self._flush_metrics)
        self.gradients = GradientsFile(self.run.records, first) if c.grad_metrics and is_first_process else None
        chip = find_chip(jax.devices()[0].device_kind)
        self.peak_speed = flops.peak_tokens_per_second(c, chip) if chip else None
        self.progress = NoProgress()
        if is_first_process:
            known_best = best if best.step else None
            self.progress = Progress(
                c.steps, first, c.batch * c.seq, elapsed_before, best=known_best, with_mfu=bool(chip)
            )
        stack.enter_context(self.progress)
        self.observers = stack.enter_context(Observers(self.progress.show_message))
        if is_first_process:
            make_events = lambda: TensorBoardEvents(self.run.records / "tensorboard", new=first == 0)
            self.observers.start("TensorBoard", make_events)
            self._start_trackers()
        steps = parsing.parse_steps_range("profile", c.profile) if is_first_process else None
        folder = self.run.records / "profile"
        self.profiler = stack.enter_context(StepProfiler(steps, folder, self.progress.show_message))
        self.checkpoints = stack.enter_context(RunCheckpoints(self.run, best, self.progress.show_message, self.lock))
        self.throughput = Throughput(c.batch * c.seq, first, elapsed_before)

    def _start_trackers(self) -> None:
        settings = dataclasses.asdict(self.config)
        if self.config.tracker:
            make_tracker = trackers.import_tracker(self.config.tracker)
            self.observers.start(self.config.tracker, lambda: make_tracker(settings))
        if self.config.wandb:
            make_wandb = lambda: trackers.WandbTracker(self.config.wandb, self.run.records, settings)
            self.observers.start("Weights & Biases", make_wandb)

    def _flush_metrics(self) -> None:
        with contextlib.suppress(RunError):  # each row that could not be written was reported
            self.metrics.flush()

    def _dispatch(self, state: TrainState, step: int) -> tuple[TrainState, jax.Array]:
        """Hands a step to the devices without waiting for it."""
        self.profiler.begin(step)
        began = time.monotonic()
        with processes.ending_all_on_failure(raised_on_all=()):  # each process reads rows of its own
            batch = next(self.batches)
        self.seconds_without_data += time.monotonic() - began
        if self.config.grad_metrics and self._is_logged(step):
            jax.block_until_ready(state)  # the steps in flight are training: their time counts
            with self.throughput.pause():
                metrics = self.trainer.gradient_metrics(state, batch)
            if self.gradients:
                self.checkpoints.try_to_write(lambda: self.gradients.write(step, metrics))
        return self.trainer.step(state, batch, step - 1)

    def _read(self, state: TrainState, step: int, metrics: jax.Array) -> dict:
        """Waits for a step and gives its metrics; where one is not finite, saves the state before it and raises."""
        values: StepMetrics = self.trainer.read_metrics(metrics)
        broken = [f"{name} is {value}" for name, value in values._asdict().items() if not math.isfinite(value)]
        if broken:
            problem = f"step {step}: {', '.join(broken)}"
            advice = "A smaller lr or clip, a longer warmup or dtype=float32 may help"
            if all(map(math.isfinite, (values.loss, values.z_loss, values.accuracy, values.grad_norm))):
                raise RunError(f"{problem}. The step was applied, so its state is not saved; resume goes on from the "
                               f"newest checkpoint. {advice}")  # fmt: skip
            self.checkpoints.save_last_state(state)
            raise RunError(
                f"{problem}. The step was not applied; the last sound state is saved as step {int(state.step)}. "
                f"{advice}, and if the loss had gone up before, a start from an earlier checkpoint"
            )
        self.profiler.end(step)
        self.progress.advance(step)
        if step == self.first_step + 1:
            self.throughput.begin(step)  # from here on the steps are compiled
        return {"step": step, **values._asdict()}

    def _complete(self, state: TrainState, row: dict, evaluating: bool, saving: bool) -> None:
        """Evaluates, logs and saves at a step after which none is in flight."""
        step = row["step"]
        if evaluating:
            evaluation = self._validate(state.params)
            row |= {"val_loss": evaluation.loss, "val_accuracy": evaluation.accuracy}
            row |= {"val_nats_per_byte": evaluation.nats_per_byte, "val_bits_per_byte": evaluation.bits_per_byte}
            saving |= self.checkpoints.update_best(step, evaluation.loss)
        if saving:
            with self.throughput.pause():
                snapshot = self.checkpoints.take_snapshot(state)
            if evaluating:  # again: that the best before it was not saved may have come to light
                self.checkpoints.update_best(step, evaluation.loss)
        self._log(row)  # first, because a resume from this checkpoint continues after this row
        if saving:
            self.checkpoints.write(snapshot, step)

    def _validate(self, params) -> Evaluation:
        show = lambda done, total: self.progress.show_evaluation("validation", done, total)
        with self.throughput.pause():
            return self.evaluator.evaluate("validation", params, self.config.eval_batches or 0, show)

    def _log(self, row: dict) -> None:
        if not ("val_loss" in row or self._is_logged(row["step"])):
            return
        speed = self.throughput.measure(row["step"])
        row |= {
            "tokens_per_s": speed,
            "mfu": speed / self.peak_speed if speed and self.peak_speed else None,
            "save_s": self.checkpoints.take_seconds_waited(),
            "elapsed_s": self.throughput.elapsed(),
            "data_s": self.seconds_without_data,
            "peak_bytes": measure_peak_bytes(),
        }
        self.seconds_without_data = 0.0
        if self.metrics:
            self.checkpoints.try_to_write(lambda: self.metrics.append(row))
        self.observers.write(row)
        self.progress.show_row(row)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == 1


def _choose_steps_in_flight(seconds_per_step: float) -> int:
    """A run that stops waits for the steps in flight: one slow step is enough to keep the device busy.

    Several processes keep to one number, because a non-finite step must find all of them at the same step.
    """
    return 1 if seconds_per_step > SLOW_STEP and jax.process_count() == 1 else IN_FLIGHT
