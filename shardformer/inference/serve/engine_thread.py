"""The thread that steps the engine: requests come in through a queue, tokens go out through callbacks."""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from shardformer.inference.generator import CHUNK
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.jobs import Job
from shardformer.inference.serve.server_metrics import ServerMetrics

STEP_SECONDS = 0.05  # a step draws as many tokens as take about this long, so that new requests soon join


class Full(Exception):
    """Too many continuations wait."""


class EngineThread(threading.Thread):
    """Steps the engine while it has jobs. `ended(job)` is called for each job that ends, fails or is cancelled."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, queue_bound: int):
        super().__init__(name="engine", daemon=True)
        self.engine, self.metrics, self._bound = engine, metrics, queue_bound
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: dict[int, Callable[[Job], None]] = {}
        self._lock = threading.Lock()
        self._accepted = 0  # jobs that were submitted and have not ended
        self._seconds_per_token = STEP_SECONDS
        self._stopped = False

    def submit(self, jobs: Sequence[Job], ended: Callable[[Job], None]) -> None:
        """Queues jobs; raises Full if more than the bound would wait."""
        with self._lock:
            if self._accepted + len(jobs) > self.capacity:
                self.metrics.rejected += 1
                raise Full
            self._accepted += len(jobs)

        def start():
            for job in jobs:
                if job.cancelled:
                    self._forget(job)
                    continue
                self._ended[id(job)] = ended
                try:
                    self.engine.submit(job)
                except Exception as error:
                    self._end(job, error)

        self._inbox.put(start)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Ends jobs whose client has gone or whose time is over."""
        for job in jobs:
            job.cancelled = True  # seen by `start`, if they have not started

        def cancel():
            for job in jobs:
                if id(job) in self._ended:
                    self.engine.cancel(job)
                    self._end(job)

        self._inbox.put(cancel)

    def stop(self) -> None:
        self._stopped = True
        self._inbox.put(None)

    @property
    def capacity(self) -> int:
        """Returns the most jobs that run and wait at once."""
        return self._bound + self.engine.programs.rows

    @property
    def accepted(self) -> int:
        return self._accepted

    def run(self) -> None:
        while not self._stopped:
            self._take_messages()
            if self._stopped or self.engine.idle:
                continue
            try:
                self._step()
            except Exception as error:  # such as out of memory: these requests fail, later ones are served
                traceback.print_exc()
                self._fail_all(error)

    def _take_messages(self) -> None:
        """Runs the messages of other threads; waits for one if there is nothing to compute."""
        while not self._stopped and (self.engine.idle or not self._inbox.empty()):
            message = self._inbox.get()
            if message:
                message()

    def _step(self) -> None:
        started = time.perf_counter()
        count = max(1, min(CHUNK, int(STEP_SECONDS / self._seconds_per_token)))
        before = self._count_tokens()
        ended = self.engine.step(count=count)
        drawn = max(self._count_tokens(ended) - before, 0)
        self.metrics.generated_tokens += drawn
        self.metrics.steps += 1
        if self.engine.prefixes:
            self.metrics.prefix_tokens = self.engine.prefixes.found_tokens
        if passes := self.engine.passes:
            # A step may also read, so that this is an upper bound; it decays, as the first is slow.
            seconds = (time.perf_counter() - started) / passes
            self._seconds_per_token = max(0.5 * self._seconds_per_token + 0.5 * seconds, 1e-5)
        for job in ended:
            self._end(job)

    def _count_tokens(self, ended: Sequence[Job] = ()) -> int:
        return sum(len(job.ids) for job in [*self.engine.running, *ended])

    def _end(self, job: Job, failure: Exception | None = None) -> None:
        job.failure = failure or job.failure
        if call := self._ended.pop(id(job), None):
            self._forget(job)
            call(job)

    def _forget(self, job: Job) -> None:
        self.metrics.cancelled += job.cancelled
        with self._lock:
            self._accepted -= 1

    def _fail_all(self, error: Exception) -> None:
        for job in self.engine.reset():
            self._end(job, error)
