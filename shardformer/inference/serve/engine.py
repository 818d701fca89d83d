"""Continuous batching: continuations join and leave rows of a KV cache between two compiled steps. Host side."""

import collections
import itertools
from collections.abc import Iterable, Iterator

from shardformer.errors import UsageError
from shardformer.inference.generator import CHUNK
from shardformer.inference.serve.jobs import SMALLEST_POOL, Job, Weights
from shardformer.inference.serve.slot_pool import SlotPool
from shardformer.inference.serve.slot_programs import LONGEST_CHUNK, SlotPrograms
from shardformer.model import Model


class Engine:
    """The rows of one model. Not thread-safe: one thread submits, cancels and steps.

    The shape of a product may decide how a device rounds it. So each program has one number of rows. The length of a
    context decides the chunks in which it is read, and the pool of its row. When a row outgrows its pool, its context
    is read again in the next pool.
    """

    def __init__(self, model: Model, slots: int, vocab_size: int | None = None):
        if model.config.parallel.pp > 1:
            raise UsageError(
                f"text cannot be generated with pipeline stages, got mesh={model.config.parallel.mesh}; make a Model "
                "of config.without_stages()"
            )
        self.config, self.vocab_size = model.config.model, vocab_size or model.config.model.vocab
        self.programs = SlotPrograms(model, slots)
        self._shards = model.config.parallel.dp
        self._per_shard = self.programs.rows // self._shards
        sizes = [SMALLEST_POOL]
        while sizes[-1] < self.config.seq:
            sizes.append(4 * sizes[-1])
        sizes = [min(size, self.config.seq) for size in sizes]
        self._pools = [SlotPool(self.programs, size, model.config.parallel.dp, self.vocab_size) for size in sizes]
        self._sizes = [pool.size for pool in self._pools]
        self._waiting: collections.deque[Job] = collections.deque()
        self._arrivals = itertools.count()

    def load(self, params, name: str = "") -> Weights:
        """Returns the parameters in the form for decoding."""
        return Weights(self.programs.unstack(params), name)

    @property
    def running(self) -> list[Job]:
        return [job for pool in self._pools for job in pool.running]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def submit(self, job: Job) -> None:
        """Queues a job; raises UsageError for ids that the model does not know."""
        if not job.prompt:
            raise UsageError("a prompt has no tokens; give at least one")
        if not 0 <= min(job.prompt) <= max(job.prompt) < self.vocab_size:
            raise UsageError(f"a prompt has token ids outside 0..{self.vocab_size - 1}, which the model does not know")
        if job.scores_prompt and len(job.prompt) > self.config.seq:
            raise UsageError(
                f"a prompt of {len(job.prompt)} tokens is longer than the context, {self.config.seq}; shorten it"
            )
        job.arrival = next(self._arrivals)
        job.choose_context(self.config, self._sizes)
        self._waiting.append(job)

    def cancel(self, job: Job) -> None:
        """Frees the row of a job, or takes it out of the queue."""
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        self._free(job)

    def reset(self) -> list[Job]:
        """Drops all jobs and the caches, which a failed step may have left without memory; returns the jobs."""
        jobs = [*self.running, *self._waiting]
        self._waiting.clear()
        for pool in self._pools:
            pool.forget()
        return jobs

    def step(self, read_budget: float = LONGEST_CHUNK, count: int = CHUNK) -> list[Job]:
        """Reads chunks of contexts up to a number of tokens, draws up to `count` tokens; returns ended jobs."""
        self._admit()
        ended: list[Job] = []
        while read_budget > 0 and (first := self._choose_reader()):
            pool, reading = first
            read_budget -= pool.read(reading)
            ended += self._collect()
        if self._choose_reader():  # the next chunk should not wait
            count = 1
        for pool in self._pools:
            active = [job for job in pool.running if not job.reading]
            for weights in {id(job.weights): job.weights for job in active}.values():
                pool.draw(weights, [job for job in active if job.weights is weights], count)
        ended += self._collect()
        self._move()
        return ended

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yields jobs in their order when they have ended; takes no more of them than find a free row."""
        jobs = iter(jobs)
        order: collections.deque[Job] = collections.deque()
        while True:
            while not self.waiting and (job := next(jobs, None)):
                self.submit(job)
                order.append(job)
                self._admit()
            if not order:
                return
            self.step(read_budget=float("inf"))
            while order and order[0].done:
                yield order.popleft()

    def _collect(self) -> list[Job]:
        ended = [job for job in self.running if job.done]
        for job in ended:
            self._free(job)
        return ended

    def _free(self, job: Job) -> None:
        for pool in self._pools:
            pool.remove(job)

    def _admit(self) -> None:
        """Moves waiting jobs into free rows of their pools; a later one passes those whose pool is full."""
        left = [job for job in self._waiting if not self._pools[self._sizes.index(job.size)].add(job)]
        if len(left) < len(self._waiting):
            self._waiting = collections.deque(left)

    def _choose_reader(self) -> tuple[SlotPool, list[Job]] | None:
        """Returns the pool whose reader came first, and its jobs that read, in the order of their numbers."""
        readers = [(pool, [job for job in pool.running if job.reading]) for pool in self._pools]
        readers = [(pool, sorted(jobs, key=lambda job: job.arrival)) for pool, jobs in readers if jobs]
        return min(readers, key=lambda reader: reader[1][0].arrival) if readers else None

    def _move(self) -> None:
        """Queues the jobs that have filled their rows, ahead of jobs that have not started."""
        for job in [job for job in self.running if not job.reading and job.room <= 0]:
            self._free(job)
            job.choose_context(self.config, self._sizes)
            self._waiting.appendleft(job)
