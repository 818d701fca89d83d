"""What a person watches beside metrics.csv, such as TensorBoard: it can neither end a run nor slow it down.

Each observer lives in a thread of its own, with a bounded queue of rows; what goes wrong there is said once.
"""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable

_LONGEST_QUEUE = 1000  # rows; an observer that is slower than this loses rows
_SECONDS_TO_FINISH = 10  # that the end of a run waits for an observer


class Observers:
    """`start(name, make)` adds one: make() gives an object with write(row) and close()."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Observers":
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers:
            worker.finish()
        self._say_problems()

    def start(self, name: str, make: Callable[[], object]) -> None:
        self._workers.append(_Worker(name, make))

    def write(self, row: dict) -> None:
        for worker in self._workers:
            worker.send(dict(row))  # its own: it may change it while others read theirs
        self._say_problems()

    def _say_problems(self) -> None:
        for worker in self._workers:
            while worker.problems:
                self._say(f"{worker.problems.popleft()}; training continues")


class _Worker:
    def __init__(self, name: str, make: Callable[[], object]):
        self.problems: collections.deque[str] = collections.deque()
        self._name, self._make, self._said = name, make, set()
        self._rows: queue.Queue[dict | None] = queue.Queue(_LONGEST_QUEUE)
        self._thread = threading.Thread(target=self._work, name=f"observer {name}", daemon=True)
        self._thread.start()

    def send(self, row: dict | None) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if self._thread.is_alive():
                self._report("is too slow: it does not get every row")

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=_SECONDS_TO_FINISH)
        self._thread.join(_SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self._report(f"did not finish within {_SECONDS_TO_FINISH} s: its last rows may be missing")

    def _work(self) -> None:
        """BaseException, because a tracker that calls sys.exit must not end the run either."""
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
            observer.close()
        except BaseException as error:
            self._report(f"failed: {_describe(error)}")

    def _report(self, problem: str) -> None:
        """Once: a problem that comes back with every row is one problem."""
        if problem not in self._said:
            self._said.add(problem)
            self.problems.append(f"{self._name} {problem}")


def _describe(error: BaseException) -> str:
    """In one line."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
