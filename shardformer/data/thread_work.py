"""Items of work in as many threads as there are cores, with a progress."""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError
from typing import TypeVar

from shardformer.data.source import Progress

Task = TypeVar("Task")
Result = TypeVar("Result")
SECONDS_BETWEEN_REPORTS = 0.5


def run_in_threads(
    work: Callable[[Task, int, Callable[[int], object]], Result],
    tasks: Sequence[Task],
    total: int,
    progress: Progress,
    seconds_between_reports: float = SECONDS_BETWEEN_REPORTS,
) -> Iterator[Result]:
    """Yields `work(task, number, advance)` of each task as it ends; `advance` counts bytes of `total`."""
    counter = _Counter()
    progress(0, total)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(work, task, number, counter.advance) for number, task in enumerate(tasks)}
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, seconds_between_reports, FIRST_COMPLETED)
                for task in done:
                    yield task.result()
                progress(min(counter.value, total - 1) if waiting else total, total)
        except BaseException:
            counter.stops = True  # else Ctrl-C would wait until the running items end
            pool.shutdown(cancel_futures=True)
            raise


class _Counter:
    """The bytes that all threads have read."""

    def __init__(self) -> None:
        self.value, self._lock, self.stops = 0, threading.Lock(), False

    def advance(self, count: int) -> None:
        if self.stops:
            raise CancelledError  # nobody takes the result
        with self._lock:
            self.value += count
