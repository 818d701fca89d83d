"""The training loop: dispatches steps, logs their metrics, evaluates and saves; a failure or a stop loses no step."""

import time
from collections import deque
from collections.abc import Iterator

import jax

from shardformer.checkpoint import Lock
from shardformer.devices import processes
from shardformer.logs import goodput
from shardformer.logs.observers import Observer
from shardformer.training.checkpoint_progress import Best
from shardformer.training.evaluation import Evaluation, EvaluationStopped, Evaluator
from shardformer.training.host_feature import GoBack, HostFeature
from shardformer.training.outputs import Outputs, open_outputs
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState
from shardformer.training.stop_signal import StopSignal, print_line
from shardformer.training.trainer import choose_steps_ahead

READS_UNTIL_AGREED = 2  # the first step compiles; the second is as slow as all others


def train(
    run: Run,
    evaluator: Evaluator,
    batches: Iterator,
    state: TrainState,
    best: Best,
    stop: StopSignal,
    lock: Lock | None = None,
    sink: Observer | None = None,
    features: tuple[HostFeature, ...] = (),
) -> Best:
    """Trains from the state's step to the last step, or until a stop; returns the best checkpoint.

    Every process calls it. `batches` yields the batch of each step after the state's. `sink` receives the logged rows.
    """
    first_step = int(state.step)
    unevaluated = run.read_unevaluated(first_step)
    last_row = first_step - 1 if unevaluated else first_step  # that row is rewritten with its evaluation
    with open_outputs(run, best, first_step, lock, last_row, sink, evaluator.trainer.model.details) as outputs:
        for feature in features:
            feature.open(run, first_step)
        show = outputs.progress.show_message if jax.process_index() == 0 else print_line
        with stop.printed_by(show, plan="finishing the step in flight, then saving"):
            goodput.CLOCK.begin_steps()
            while True:
                loop = TrainingLoop(evaluator, batches, outputs, stop, first_step, features)
                try:
                    return loop.train(state, unevaluated)
                except GoBack as request:
                    first_step, restore, unevaluated = request.step, request.restore, None
                outputs.checkpoints.wait()
                state = restore()
                if first_step == run.config.training.steps:
                    outputs.checkpoints.save_last_state(state)
                batches = evaluator.corpus.train_batches(run.config, first_step, evaluator.trainer.local_rows)


class TrainingLoop:
    """One run in training, between the step it starts from and the step at which it ends or stops."""

    def __init__(
        self,
        evaluator: Evaluator,
        batches: Iterator,
        outputs: Outputs,
        stop: StopSignal,
        first_step: int,
        features: tuple[HostFeature, ...] = (),
    ):
        self.evaluator, self.batches, self.outputs = evaluator, batches, outputs
        self.stop, self.first_step, self.features = stop, first_step, features
        self.trainer = evaluator.trainer
        self.config = self.trainer.config
        self.checkpoints = outputs.checkpoints
        self.pacing = Pacing()

    def train(self, state: TrainState, unevaluated: dict | None = None) -> Best:
        """Runs the steps.

        `unevaluated` contains the metrics of the last step before a stop that interrupted its evaluation: the
        evaluation comes first.
        """
        c, step, show = self.config, self.first_step, self.outputs.progress.show_message
        if unevaluated:
            self._complete(state, unevaluated, evaluating=True, saving=False)
        if step >= c.training.steps and not self.stop.is_obeyed:
            show(f"nothing left to train: the run is at step {step} of {c.training.steps}")
            return self.checkpoints.best
        pending: deque[tuple[int, jax.Array]] = deque()
        while step < c.training.steps and not self.stop.is_requested():
            step += 1
            state, metrics = self._dispatch(state, step)
            pending.append((step, metrics))
            self.checkpoints.poll()
            evaluating = self.evaluator.validates and (step % c.run.eval_every == 0 or step == c.training.steps)
            saving = step == c.training.steps or self.checkpoints.is_due(step)
            while len(pending) > (1 if evaluating or saving else self.pacing.steps_ahead):
                self._log(self._read(state, *pending.popleft()))
                self.pacing.count_read()
            if evaluating or saving:
                self._complete(state, self._read(state, *pending.popleft()), evaluating, saving)
                self.pacing.restart()
        if self.stop.is_obeyed:
            self._stop(state, pending, step)
        return self.checkpoints.best

    def _stop(self, state: TrainState, pending: deque, step: int) -> None:
        """Waits for the steps in flight, and saves the last of them."""
        while pending:
            self._log(self._read(state, *pending.popleft()))
        if step > self.first_step:
            self.checkpoints.save_last_state(state)
        name = self.stop.name or "preemption"
        self.outputs.progress.show_message(f"{name}: stopped after step {step} of {self.config.training.steps}")

    def _dispatch(self, state: TrainState, step: int) -> tuple[TrainState, jax.Array]:
        """Hands a step to the devices without waiting for it."""
        self.outputs.profiler.begin(step)
        with goodput.CLOCK.spending("data"), processes.ending_all_on_failure(raised_on_all=()):
            batch = next(self.batches)  # each process reads different rows
        if self._is_logged(step):
            for feature in self.features:
                feature.before_logged_step(state, batch, step, self.outputs)
        return self.trainer.step(state, batch, step - 1)

    def _read(self, state: TrainState, step: int, metrics: jax.Array) -> dict:
        """Waits for a step and returns its metrics."""
        row = {"step": step, **self.trainer.read_metrics(metrics)._asdict(), **self.trainer.read_details(metrics)}
        for feature in self.features:
            row = feature.after_step(row, metrics, state, self.outputs)
        self.outputs.profiler.end(step)
        self.outputs.progress.advance(step)
        if step == self.first_step + 1:
            self.outputs.throughput.begin(step)  # from here on the steps are compiled
        return row

    def _complete(self, state: TrainState, row: dict, evaluating: bool, saving: bool) -> None:
        """Evaluates, logs and saves a step after which none is in flight; a stop during the evaluation only saves."""
        step = row["step"]
        if evaluating:
            try:
                evaluation = self._validate(state.params)
            except EvaluationStopped:
                if step > self.first_step:
                    self.checkpoints.write(self.checkpoints.take_snapshot(state), step, unevaluated=row)
                return
            row |= {"val_loss": evaluation.loss, "val_accuracy": evaluation.accuracy}
            row |= {"val_nats_per_byte": evaluation.nats_per_byte, "val_bits_per_byte": evaluation.bits_per_byte}
            is_best = self.checkpoints.update_best(step, evaluation.loss)
            saving |= is_best and step > self.first_step
        if saving:
            with self.outputs.throughput.pause():
                snapshot = self.checkpoints.take_snapshot(state)
            if evaluating:  # repeated: waiting may have revealed that the previous best was not saved
                self.checkpoints.update_best(step, evaluation.loss)
        self._log(row)  # first, because a resume from this checkpoint continues after this row
        if saving:
            self.checkpoints.write(snapshot, step)
        if evaluating:
            for feature in self.features:
                feature.after_evaluation(state, step, self.outputs)

    def _validate(self, params) -> Evaluation:
        """Evaluates the validation split, showing how far the evaluation is."""

        def show(done: int, total: int) -> None:
            self.outputs.progress.show_evaluation("validation", done, total)

        with self.outputs.throughput.pause(), goodput.CLOCK.spending("evaluation"):
            limit, is_stopped = self.config.run.eval_batches or 0, self.stop.is_requested
            return self.evaluator.evaluate("validation", params, limit, show, is_stopped)

    def _log(self, row: dict) -> None:
        """Writes a row if its step is one to be logged."""
        if "val_loss" in row or self._is_logged(row["step"]):
            self.outputs.write_row(row)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.run.log_every == 0 or step == 1


class Pacing:
    """The number of steps to dispatch ahead of the step that is waited for, by the time of a step."""

    def __init__(self):
        self.steps_ahead = 1  # until the time of a compiled step is known
        self._reads = 0
        self._settled = time.monotonic()

    def count_read(self) -> None:
        """Notes that a step has ended, and chooses how many steps to dispatch ahead.

        Processes agree on the number once. Their clocks differ, and all must have dispatched the same steps when one of
        these is not finite.
        """
        before, self._settled = self._settled, time.monotonic()
        self._reads += 1
        choice = choose_steps_ahead(self._settled - before)
        if jax.process_count() == 1:
            self.steps_ahead = choice
        elif self._reads == READS_UNTIL_AGREED:
            self.steps_ahead = int(processes.text_of_first_process(str(choice)))

    def restart(self) -> None:
        """Leaves the time of an evaluation or a save out of the next step's."""
        self._settled = time.monotonic()
