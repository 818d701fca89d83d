"""Ctrl-C and SIGTERM ask training to save and stop."""

import os
import signal

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Ctrl-C or SIGTERM asks the loop to save and end; a second Ctrl-C ends the process at once."""

    def __init__(self):
        self.name = ""

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, _):
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._leave)
        # Written past Python's buffers, which the signal may have interrupted.
        os.write(1, f"\n{self.name}: finishing the steps under way, then saving; Ctrl-C now ends at once\n".encode())
        if number == signal.SIGINT and jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)  # which JAX's own service listens to, and tells the others of

    @staticmethod
    def _leave(*_):
        os.write(2, b"shardformer: ended at once; what came after the last checkpoint is lost\n")
        os._exit(1)  # an orderly exit would wait for the device, or pull the interpreter away from under it

    def requested(self, step: int) -> bool:
        """The same answer on every process, or some would wait for the others' collectives for ever."""
        if jax.distributed.is_initialized():  # it has taken SIGTERM over from Python, with a single process too
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self.name)
