"""One request while the engine computes it: its jobs, and their events in the loop of the server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from shardformer.errors import UsageError
from shardformer.inference.serve.answers import Answer
from shardformer.inference.serve.embeddings import EmbeddingAnswer
from shardformer.inference.serve.engine_thread import EngineThread, Full
from shardformer.inference.serve.jobs import Job, Tokens
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.responses.response_answer import ResponseAnswer

StreamedAnswer = Answer | ResponseAnswer
AnswerType = TypeVar("AnswerType", bound=StreamedAnswer | EmbeddingAnswer)


class Exchange(Generic[AnswerType]):
    """The jobs of one request while they run. Leaving `events` early cancels them."""

    def __init__(
        self, thread: EngineThread, answer: AnswerType, jobs: list[Job], seconds: float, running: "set[Exchange]"
    ):
        """seconds: the limit of a request; running: the set that holds the exchange while its jobs run."""
        self.answer = answer
        self._thread, self._jobs, self._seconds, self._running = thread, jobs, seconds, running
        self._events: asyncio.Queue[tuple[int, Tokens | None] | ApiError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._index = {id(job): index for index, job in enumerate(jobs)}
        self._started = time.perf_counter()

    def submit(self) -> None:
        """Queues the jobs; raises ApiError if the queue is full."""
        for job in self._jobs:
            job.watch = self._put
        try:
            self._thread.submit(self._jobs, self._put)
        except Full:
            raise ApiError(429, "the queue is full; try again later", code="queue_full") from None
        self._running.add(self)

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error, from the loop of the server."""
        self._events.put_nowait(error)

    def _put(self, job: Job, tokens: Tokens | None = None) -> None:
        """Passes an event from the engine's thread to the loop of the server."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server stops
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index[id(job)], tokens))

    async def events(self) -> AsyncIterator[tuple[int, Tokens | None]]:
        """Yields (choice, new tokens), and (choice, None) when it has ended."""
        metrics, left, first = self._thread.metrics, len(self._jobs), True
        deadline = self._started + self._seconds
        try:
            while left:
                try:
                    async with asyncio.timeout(max(deadline - time.perf_counter(), 0)):
                        event = await self._events.get()
                except TimeoutError:
                    text = f"the request took more than {self._seconds:g} seconds"
                    raise ApiError(504, text, code="timeout") from None
                if isinstance(event, ApiError):
                    raise event
                index, tokens = event
                if first and tokens is not None:
                    metrics.first_token.add(time.perf_counter() - self._started)
                    first = False
                if tokens is None:
                    left -= 1
                    failure = self._jobs[index].failure
                    if isinstance(failure, UsageError):
                        raise ApiError(400, str(failure))
                    if failure:
                        raise ApiError(500, f"the request failed: {type(failure).__name__}: {failure!s:.200}")
                yield index, tokens
            metrics.duration.add(time.perf_counter() - self._started)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the jobs that still run."""
        self._running.discard(self)
        if open_jobs := [job for job in self._jobs if not job.done]:
            self._thread.cancel(open_jobs)
