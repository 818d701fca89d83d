"""Observers of a run besides metrics.csv, such as TensorBoard or the tracker that `tracker=` names.

They can neither end a run nor slow it down: each has a thread and a bounded queue of rows. Each of its problems is
reported once.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shardformer.messages import log


class Observer(Protocol):
    """An object that receives the logged rows of a run.

    After an error, the end of the run calls `close_failed()` in place of `close()`, if the observer has it.
    """

    def write(self, row: dict) -> None: ...

    def close(self) -> None: ...


class Observers:
    """The observers of one run. `start(name, make)` adds one; make() returns it and runs in its thread.

    Arguments:
      queue_rows: the longest queue; an observer that is slower than this loses rows.
      finish_seconds: the longest wait for an observer at the end of a run.
    """

    def __init__(self, queue_rows: int = 1000, finish_seconds: float = 10):
        self._queue_rows, self._finish_seconds = queue_rows, finish_seconds
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Observers":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.finish(failed=error is not None)
        self._print_problems()

    def start(self, name: str, make: Callable[[], Observer], finish_seconds: float | None = None) -> None:
        seconds = self._finish_seconds if finish_seconds is None else finish_seconds
        self._workers.append(_Worker(name, make, self._queue_rows, seconds))

    def write(self, row: dict) -> None:
        for worker in self._workers:
            worker.send(dict(row))  # a copy, as an observer may change its row
        self._print_problems()

    def _print_problems(self) -> None:
        for worker in self._workers:
            while worker.problems:
                log.info(f"{worker.problems.popleft()}; training continues")


class _Worker:
    def __init__(self, name: str, make: Callable[[], Observer], queue_rows: int, finish_seconds: float):
        self.problems: collections.deque[str] = collections.deque()
        self._name, self._make, self._finish_seconds = name, make, finish_seconds
        self._reported: set[str] = set()
        self._failed = False  # the run, known at its end
        self._rows: queue.Queue[dict | None] = queue.Queue(queue_rows)
        self._thread = threading.Thread(target=self._work, name=f"observer {name}", daemon=True)
        self._thread.start()

    def send(self, row: dict | None) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if self._thread.is_alive():
                self._report("is too slow: it does not receive every row")

    def finish(self, failed: bool) -> None:
        self._failed = failed
        end = time.monotonic() + self._finish_seconds
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=self._finish_seconds)
        self._thread.join(max(end - time.monotonic(), 0))
        if self._thread.is_alive():
            self._report(f"did not finish within {self._finish_seconds} s: its last rows may be missing")

    def _work(self) -> None:
        # Catches BaseException, because a tracker that calls sys.exit must not end the run either.
        try:
            observer = self._make()
        except BaseException as error:
            self._report(f"did not start: {_describe(error)}")
            return
        while (row := self._rows.get()) is not None:
            try:
                observer.write(row)
            except BaseException as error:
                self._report(f"failed: {_describe(error)}")
        try:
            close = getattr(observer, "close_failed", observer.close) if self._failed else observer.close
            close()
        except BaseException as error:
            self._report(f"failed: {_describe(error)}")

    def _report(self, problem: str) -> None:
        """Records a problem, once: it may come back with every row."""
        if problem not in self._reported:
            self._reported.add(problem)
            self.problems.append(f"{self._name} {problem}")


def _describe(error: BaseException) -> str:
    """Returns the first line of the message, or the type of an error without a message."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
