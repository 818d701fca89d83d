"""When a run saves, and what it does about a save that fails."""

import time
from collections.abc import Callable

import jax

from shardformer import checkpoint, processes
from shardformer.checkpoint import Snapshot
from shardformer.errors import RunError
from shardformer.training.run_folder import Best, Run
from shardformer.training.step import TrainState


class Saves:
    """The checkpoints of a run in training; leaving waits for the one that is being written."""

    def __init__(self, run: Run, best: Best, say: Callable[[str], None]):
        self.best = best
        self._run, self._say, self._config = run, say, run.config
        self._saver = checkpoint.Saver(run.out)
        self._in_flight = self._sound = best  # the best so far as the last save knew it, and the last that succeeded
        self._since = time.monotonic()
        self._lost = 0.0
        self._unwritten, self._said = "", set()  # what else could not be written: to raise at the next save, or said

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, kind, *_) -> None:
        # A process that fails alone must not wait for the others.
        together = jax.process_count() == 1 or kind is None or issubclass(kind, RunError)
        try:
            if kind is None:
                self.settle(last=True)
        finally:
            self._saver.close(wait=together)

    def due(self, step: int) -> bool:
        """By the number of steps or by the clock, which several processes ask, together, at logged steps alone."""
        c = self._config
        if self._unwritten and jax.process_count() == 1:
            return True
        if any(every and step % every == 0 for every in (c.save_every, c.keep_every)):
            return True
        if not c.save_minutes or (jax.process_count() > 1 and step % c.log_every):
            return False
        late = time.monotonic() - self._since >= 60 * c.save_minutes
        return bool(processes.first_message_from_any_process("late" if late else ""))

    def is_best(self, step: int, val_loss: float) -> bool:
        if better := val_loss < self.best.val_loss:
            self.best = Best(step, val_loss)
        return better

    def copy(self, state: TrainState) -> Snapshot:
        """The state in host memory: all that training waits for, with the end of the save before it."""
        start = time.monotonic()
        self.settle()
        copy = checkpoint.take_snapshot(state)
        self._since = time.monotonic()
        self._lost += self._since - start
        return copy

    def write(self, copy: Snapshot, step: int) -> None:
        best = self._in_flight = self.best
        self._saver.save(step, copy, self._run.documents(step, best), then=lambda: self._run.prune(best))
        if failure := processes.first_message_from_any_process(self._unwritten):
            self.settle(last=True)
            raise RunError(f"{failure}; the run is saved as step {step}")

    def at_end(self, state: TrainState) -> None:
        """Saves a state after which nothing comes, unless it is there already."""
        self.settle()
        step = int(state.step)
        if not checkpoint.step_folder(self._run.out, step).exists():
            self.write(self.copy(state), step)
            self.settle(last=True)

    def seconds_lost(self) -> float | None:
        """To training since the last call; None where nothing was saved."""
        lost, self._lost = self._lost, 0.0
        return lost or None

    def without(self, error: RunError) -> None:
        """Another file of the run could not be written, by this process: the next save is the last, or all goes on."""
        if self._config.on_save_error == "stop":
            self._unwritten = str(error)
        elif str(error) not in self._said:  # once, or it would be said at every step
            self._said.add(str(error))
            self._go_on(error)

    def _go_on(self, error: RunError) -> None:
        self._say(f"{error}; training goes on (on_save_error=continue)")

    def check(self) -> None:
        """Hears of a failure at once, where one process trains; several must hear of it together, at the next save."""
        if jax.process_count() == 1 and self._saver.done:
            self.settle()

    def settle(self, last: bool = False) -> None:
        """Waits for the save in flight. The last one must not fail: no other would come."""
        try:
            self._saver.wait()
            self._sound = self._in_flight
        except RunError as error:
            if last or self._config.on_save_error == "stop":
                raise
            if self.best == self._in_flight and not checkpoint.step_folder(self._run.out, self.best.step).exists():
                self.best = self._sound  # the better one is not there
            self._in_flight = self._sound
            self._go_on(error)
