"""The checkpoints of a run in training, and its answer to files that cannot be written."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardformer import checkpoint, storage
from shardformer.checkpoint import FolderLost, Lock, Snapshot
from shardformer.devices import processes
from shardformer.errors import RunError
from shardformer.logs import goodput
from shardformer.messages import log
from shardformer.model import master_weights
from shardformer.training.checkpoint_progress import Best, RoundedBest, is_scheduled
from shardformer.training.run_folder import Run


class RunCheckpoints:
    """The checkpoints of a run in training. The end of the block waits for the save in flight.

    `lock` is the lock of the run folder; only the first process has one.
    """

    def __init__(
        self,
        run: Run,
        best: Best,
        lock: Lock | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.best, self._clock = best, clock
        self._run, self._config, self._lock = run, run.config, lock
        self._saver = checkpoint.Saver(run.out, lock)
        self._best_in_flight = self._best_saved = best  # of the last save, and of the last save that succeeded
        self._in_flight: tuple[Snapshot, int] | None = None
        self._last_save = self._clock()
        self._write_failure = ""  # a problem with another file of the run, to be raised after the next save
        self._said: set[str] = set()

    def __enter__(self) -> "RunCheckpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        # If only this process fails, it must not wait for the rest.
        together = jax.process_count() == 1 or kind is None or issubclass(kind, RunError)
        try:
            if kind is None:
                with goodput.CLOCK.spending("save"):
                    self.wait(last=True)
        finally:
            self._saver.close(wait=together)

    def is_due(self, step: int) -> bool:
        """Returns whether to save at this step, by the step number or by the clock.

        Multiple processes compare their clocks only at logged steps.
        """
        c = self._config
        if is_scheduled(step, c) or (self._write_failure and jax.process_count() == 1):
            return True
        if not c.run.save_minutes or (jax.process_count() > 1 and step % c.run.log_every):
            return False
        late = self._clock() - self._last_save >= 60 * c.run.save_minutes
        return bool(processes.first_message_from_any_process("late" if late else ""))

    def update_best(self, step: int, val_loss: float) -> bool:
        """Records a validation loss; returns whether it is the best so far."""
        kind = RoundedBest if master_weights.have_code_values(self._config, step) else Best
        evaluated = kind(step, val_loss)
        if better := evaluated.is_better_than(self.best):
            self.best = evaluated
        return better

    def take_snapshot(self, state: Any) -> Snapshot:
        """Copies the state to host memory, once the save before it has ended. Training waits only for this."""
        with goodput.CLOCK.spending("save"):
            self.wait()
            snapshot = checkpoint.take_snapshot(state)
        self._last_save = self._clock()
        return snapshot

    def write(self, snapshot: Snapshot, step: int, unevaluated: dict | None = None) -> None:
        """Starts to write a checkpoint. If another file could not be written, completes this save and raises why.

        `unevaluated` contains the metrics of a step whose evaluation was interrupted; resume evaluates it.
        """
        best = self._best_in_flight = self.best
        lost, path = self._find_lost_folder()
        if lost:
            self._save_elsewhere(lost, path, snapshot, step)
        self._in_flight = snapshot, step
        self._saver.save(
            step,
            snapshot,
            self._run.documents(step, best, unevaluated),
            before=lambda: storage.upload_records(self._run.out),
            then=lambda: self._run.prune(best),
        )
        if failure := processes.first_message_from_any_process(self._write_failure):
            self.wait(last=True)
            raise RunError(f"{failure}; the run is saved as step {step}")

    def save_last_state(self, state: Any) -> None:
        """Saves the state of a run that ends here, unless it is saved already."""
        self.wait()
        step = int(state.step)
        if not self._is_saved(step):
            self.write(self.take_snapshot(state), step)
            self.wait(last=True)

    def try_to_write(self, write: Callable[[], None]) -> None:
        """Writes another file of the run. A failure ends the run at its next save, or is reported once."""
        try:
            if self._lock:
                self._lock.check_still_locked()
            write()
        except FolderLost as error:
            self._write_failure = str(error)
        except (RunError, OSError) as error:
            problem = str(error) if isinstance(error, RunError) else f"cannot write in {self._run.out}: {error}"
            if self._config.run.on_save_error == "stop":
                self._write_failure = problem
            elif problem not in self._said:  # once, and not at every step
                self._said.add(problem)
                self._say_that_training_continues(problem)

    def poll(self) -> None:
        """Notices a failed save at once. Multiple processes notice it together, at the next save."""
        if jax.process_count() == 1 and self._saver.done:
            self.wait()

    def wait(self, last: bool = False) -> None:
        """Waits for the save in flight. Raises if it failed and is the last, or with on_save_error=stop."""
        try:
            self._saver.wait()
            self._best_saved, self._in_flight = self._best_in_flight, None
        except RunError as error:
            lost, path = self._find_lost_folder()
            if lost and last:
                assert self._in_flight is not None  # it is the save that failed
                self._save_elsewhere(lost, path, *self._in_flight)
            if lost:
                self._write_failure = lost  # the next save, at once in a single process, goes elsewhere
                return
            if last or self._config.run.on_save_error == "stop":
                raise
            if self.best == self._best_in_flight and not self._is_saved(self.best.step):
                self.best = self._best_saved  # the better one was not written
            self._best_in_flight = self._best_saved
            self._say_that_training_continues(str(error))

    def _is_saved(self, step: int) -> bool:
        """Returns whether the first process sees a checkpoint. On a network disk others may see an older folder."""
        result = ""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # a store that does not answer is not known to have saved anything
                result = "saved" if step in checkpoint.list_steps(self._run.out) else ""
        return bool(processes.text_of_first_process(result))

    def _say_that_training_continues(self, problem: str) -> None:
        log.info(f"{problem}; training continues (on_save_error=continue)")

    def _find_lost_folder(self) -> tuple[str, str]:
        """Returns the run folder's loss and the path to save to instead, on all processes; ("", "") if it exists."""
        lost, path = "", ""
        try:
            if self._lock:
                self._lock.check_still_locked()
        except FolderLost as error:
            out = self._run.out
            names = (f"{out}-saved{number}" for number in ("", *range(2, 1000)))
            is_free = not out.exists() or (isinstance(out, Path) and not any(out.iterdir()))
            unused = out if is_free else next(name for name in names if not storage.location(name).exists())
            lost, path = str(error), str(error.moved_to or unused)
        return processes.text_of_first_process(lost), processes.text_of_first_process(path)

    def _save_elsewhere(self, lost: str, path: str, snapshot: Snapshot, step: int) -> None:
        """Saves the state of a run whose folder was moved or deleted, and raises."""
        run = dataclasses.replace(self._run, config=self._config.replace(out=path))
        run.write_documents()
        checkpoint.save_snapshot(run.out, step, snapshot, run.documents(step, self.best))
        raise RunError(f"{lost}; the state of step {step} is saved in {path}: go on with train --resume {path}")
