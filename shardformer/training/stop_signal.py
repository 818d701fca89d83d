"""Signals that ask training to save and stop: Ctrl-C, SIGTERM, SIGHUP and the warnings of schedulers."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from shardformer.devices import processes
from shardformer.logs.streams import write_to_descriptor

STOPPING = (signal.SIGINT, signal.SIGTERM)
# SIGHUP: a closed ssh session. Before they kill, schedulers send SIGUSR1 or SIGUSR2, and `ulimit -t` SIGXCPU.
STOPPING_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # nohup ignores SIGHUP
ANNOUNCE_SECONDS = 1.0  # how long a stop waits for the line about it; an output that blocks must not hold it up
SHOW_CURSOR = "\x1b[?25h"  # a live display hides it


class StopSignal:
    """Within the block a signal asks training to save and stop; Ctrl-C after it ends the process at once.

    A thread receives the signals: Python runs its handlers only in the main thread, which may wait for the device for
    seconds.
    """

    def __init__(self) -> None:
        self.name = ""  # of the first signal, or of the request
        self._is_signalled = False
        self.is_obeyed = False  # whether is_requested has answered True
        self._is_announced = threading.Event()
        self._show: Callable[[str], None] = print_line
        self._plan = "stopping"
        self._checks = 0
        self._passed_on = threading.Lock()
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> "StopSignal":
        signals: list[int] = [*STOPPING]
        signals += [number for number in STOPPING_UNLESS_IGNORED if signal.getsignal(number) is not signal.SIG_IGN]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._listen, args=(reader, signals), name="signals", daemon=True)
        thread.start()
        self._restore.callback(thread.join)
        self._restore.callback(os.close, writer)  # which ends the thread
        self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in signals:
            self._restore.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_) -> None:
        self._restore.close()

    @contextlib.contextmanager
    def printed_by(self, show: Callable[[str], None], plan: str) -> Iterator[None]:
        """Within the block `show` prints the line about a signal, and `plan` says how the run goes on."""
        before = self._show, self._plan
        self._show, self._plan = show, plan
        try:
            yield
        finally:
            self._show, self._plan = before

    def request(self, name: str) -> None:
        """Asks for a stop without a signal; `name` is what the run's last line says of it.

        A signal that comes later gives its own name, as it asks for more.
        """
        if not self._is_signalled:
            self.name = name
        self._is_announced.set()

    def is_requested(self) -> bool:
        """Returns whether to stop now: the same answer to the same call on every process.

        The line about the signal is printed before the lines of what the stop ends.
        """
        if not self.is_obeyed:
            self.is_obeyed = self._agree_to_stop() if jax.distributed.is_initialized() else bool(self.name)
            if self.is_obeyed and self.name:
                self._is_announced.wait(ANNOUNCE_SECONDS)
        return self.is_obeyed

    def _agree_to_stop(self) -> bool:
        """A process that stopped early would leave the rest waiting in a collective."""
        if self.name:  # the signal may have come before the processes joined
            self._pass_on()
        self._checks += 1
        return multihost_utils.reached_preemption_sync_point(self._checks)

    def _note(self, number: int, _) -> None:
        if not self._is_signalled:
            self.name, self._is_signalled = signal.Signals(number).name, True

    def _listen(self, reader: int, signals: list[int]) -> None:
        """Handles each signal at once, whatever the main thread waits for."""
        is_first = True
        while received := os.read(reader, 1):  # one byte for each signal
            number = received[0]
            if number not in signals:
                continue
            if is_first:
                self._note(number, None)
                # In another thread: an output that blocks must not delay the second Ctrl-C.
                threading.Thread(target=self._announce, daemon=True).start()
                if jax.distributed.is_initialized():
                    self._pass_on()
            elif number == signal.SIGINT:
                _exit_at_once()
            is_first = False
        os.close(reader)

    def _announce(self) -> None:
        self._show(f"{self.name}: {self._plan}; Ctrl-C now ends at once")
        self._is_announced.set()

    def _pass_on(self) -> None:
        """Informs the other processes, once."""
        if self._passed_on.acquire(blocking=False):
            processes.stop_all_processes()


def print_line(text: str) -> None:
    """Prints a line at once, below what a terminal shows of Ctrl-C."""
    write_to_descriptor(1, f"\n{text}\n")


def _exit_at_once() -> None:
    """Ends the process. An orderly exit would wait for the device, or free memory that its threads still use."""
    if os.isatty(1):
        write_to_descriptor(1, SHOW_CURSOR)
    write_to_descriptor(2, "\nshardformer: ended at once; what came after the last checkpoint is lost\n")
    os._exit(1)
