"""Ctrl-C, SIGTERM and SIGHUP ask training to save and stop."""

import os
import signal

import jax
from jax.experimental import multihost_utils

from shardformer.logs.streams import write_to_descriptor


class StopSignal:
    """Within the block a signal asks the loop to save and stop; a second Ctrl-C ends the process at once."""

    def __init__(self):
        self.name, self._passed_on = "", False

    def __enter__(self) -> "StopSignal":
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._request_stop) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request_stop(self, number, _):
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._exit_at_once)
        write_to_descriptor(1, f"\n{self.name}: finishing the current steps, then saving; Ctrl-C now ends at once\n")
        if number != signal.SIGTERM and jax.distributed.is_initialized():
            self._pass_on()

    def _pass_on(self):
        self._passed_on = True
        signal.raise_signal(signal.SIGTERM)  # JAX's own service listens to it and informs the other processes

    @staticmethod
    def _exit_at_once(*_):
        write_to_descriptor(2, "shardformer: ended at once; what came after the last checkpoint is lost\n")
        os._exit(1)  # an orderly exit would wait for the device, or free memory that its threads still use

    def is_requested(self, step: int) -> bool:
        """The same answer on every process: one that stopped alone would leave the others waiting in a collective."""
        if jax.distributed.is_initialized():  # JAX handles SIGTERM then, even for a single process
            if self.name and not self._passed_on:  # it came while the processes still waited for one another
                self._pass_on()
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self.name)
