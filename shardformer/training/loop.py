"""The training loop: batches in, checkpoints and records out, and a clean end whatever happens."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import jax

from shardformer import data, processes
from shardformer.checkpoint import Snapshot
from shardformer.errors import RunError
from shardformer.logs.gradients_file import Gradients
from shardformer.logs.metrics_file import Records
from shardformer.logs.progress import Meter, Progress, Silent
from shardformer.training.evaluation import Evaluation, Evaluator
from shardformer.training.run_folder import Best, Run
from shardformer.training.saving import Saves
from shardformer.training.step import IN_FLIGHT, StepMetrics, Trainer, TrainState
from shardformer.training.stop_signal import StopSignal

SLOW = 0.5  # seconds that a step takes


class Loop:
    def __init__(self, run: Run, trainer: Trainer, evaluator: Evaluator, first_step: int):
        self.run, self.trainer, self.evaluator, self.first_step = run, trainer, evaluator, first_step
        self.config = c = trainer.config
        self.batches = data.train_batches(
            evaluator.ids["train"], seq=c.seq, batch=c.batch, seed=c.seed, first_step=first_step, rows=trainer.rows
        )

    def train(self, state: TrainState, best: Best, stop: StopSignal) -> tuple[int, Best]:
        """From the state's step to the last, or to where it is stopped; returns the step reached and the best."""
        first, steps = self.first_step, self.config.steps
        with contextlib.ExitStack() as stack:
            records = processes.succeed_or_fail_together(lambda: stack.enter_context(self._records(first)))
            self.gradients = self._gradients(first)
            self.progress = stack.enter_context(self._progress(first, best, records))
            self.saves = stack.enter_context(Saves(self.run, best, self.progress.message))
            self.meter = Meter(self.config.batch * self.config.seq, first, records.elapsed_before)
            pending, settled, in_flight = deque(), time.monotonic(), 1
            for step in range(first + 1, steps + 1):
                batch = next(self.batches)
                if self.config.grad_metrics and self._is_logged(step):
                    self._look_at_gradients(state, batch, step)
                state, metrics = self.trainer.step(state, batch, step - 1)
                pending.append((step, metrics))
                self.saves.check()
                stopping = stop.requested(step)
                evaluating = step % self.config.eval_every == 0 or step == steps
                saving = stopping or step == steps or self.saves.due(step)
                while len(pending) > (0 if evaluating or saving else in_flight):
                    at, values = pending.popleft()
                    row = self._row(state, at, self.trainer.read_metrics(values))
                    before, settled = settled, time.monotonic()
                    in_flight = _in_flight(settled - before)
                    if at == step and evaluating:
                        evaluation = self._validate(state.params)
                        row |= {"val_loss": evaluation.loss, "val_accuracy": evaluation.accuracy}
                        saving |= self.saves.is_best(step, evaluation.loss)
                    copy = self._copy(state) if at == step and saving else None
                    self._log(records, row)  # before the checkpoint that begins where this row ends is to be seen
                    if copy:
                        self.saves.write(copy, step)
                if stopping:
                    self.saves.settle(last=True)
                    self.progress.message(f"{stop.name or 'preemption'}: stopped after step {step} of {steps}")
                    return step, self.saves.best
            if first >= steps:
                self.progress.message(f"nothing left to train: the run is at step {first} of {steps}")
        return max(first, steps), self.saves.best

    def _validate(self, params) -> Evaluation:
        show = lambda done, total: self.progress.evaluating("validation", done, total)
        with self.meter.pause():
            return self.evaluator.evaluate("validation", params, self.config.eval_batches, show)

    def _row(self, state: TrainState, step: int, metrics: StepMetrics) -> dict:
        """A step's metrics as a row; a number that is not one ends the run, with the state of the step before."""
        broken = [f"{name} is {value}" for name, value in metrics._asdict().items() if not math.isfinite(value)]
        if broken:
            self.saves.at_end(state)
            raise RunError(
                f"step {step}: {', '.join(broken)}. The step was not applied; the last sound state is saved as step "
                f"{int(state.step)}. A smaller lr or clip, a longer warmup or dtype=float32 may help, and if the loss "
                "had gone up before, a start from an earlier checkpoint"
            )
        self.progress.advance(step)
        if step == self.first_step + 1:
            self.meter.begin(step)  # from here on the steps are compiled
        return {"step": step, **metrics._asdict()}

    def _log(self, records, row: dict) -> None:
        step = row["step"]
        if "val_loss" in row or self._is_logged(step):
            speed = {"tokens_per_s": self.meter.rate(step), "save_s": self.saves.seconds_lost()}
            row |= speed | {"elapsed_s": self.meter.elapsed()}
            self._write(lambda: records.write(row))
            self.progress.step(row)

    def _write(self, write: Callable[[], None]) -> None:
        """What a full disk has no room for is no more than a save that fails."""
        try:
            write()
        except RunError as error:
            self.saves.without(error)
        except OSError as error:
            self.saves.without(RunError(f"cannot write in {self.run.out}: {error}"))

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == 1

    def _look_at_gradients(self, state: TrainState, batch, step: int) -> None:
        with self.meter.pause():
            metrics = self.trainer.gradient_metrics(state, batch)
        if self.gradients:
            self._write(lambda: self.gradients.write(step, metrics))

    def _copy(self, state: TrainState) -> Snapshot:
        with self.meter.pause():
            return self.saves.copy(state)

    def _records(self, first: int):
        return Records(self.run.out, first) if jax.process_index() == 0 else _NoRecords()

    def _gradients(self, first: int) -> Gradients | None:
        return Gradients(self.run.out, first) if self.config.grad_metrics and jax.process_index() == 0 else None

    def _progress(self, first: int, best: Best, records):
        if jax.process_index():
            return Silent()
        tokens = self.config.batch * self.config.seq
        return Progress(self.config.steps, first, tokens, records.elapsed_before, best=best if best.step else None)


def _in_flight(seconds_per_step: float) -> int:
    """Whoever stops a run waits for the steps in flight: of slow ones, a single one keeps the device busy.

    Several processes keep to one number, or a step that is not a number would find them at different steps.
    """
    return 1 if seconds_per_step > SLOW and jax.process_count() == 1 else IN_FLIGHT


class _NoRecords:
    """What the other processes of a pod write: nothing."""

    elapsed_before = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write(self, row: dict) -> None:
        pass
