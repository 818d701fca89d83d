"""Continuous batching: continuations join and leave rows of a KV cache between two compiled steps. Host side."""

import collections
import itertools
from collections.abc import Iterable, Iterator

from shardformer.errors import UsageError
from shardformer.inference.generator import CHUNK, check_prompts, check_stages
from shardformer.inference.serve.jobs import SMALLEST_POOL, Job, Weights
from shardformer.inference.serve.prefix_cache import PrefixCache
from shardformer.inference.serve.slot_pool import SlotPool
from shardformer.inference.serve.slot_programs import LONGEST_CHUNK, SlotPrograms
from shardformer.model import Model


class Engine:
    """The rows of one model. Not thread-safe: one thread submits, cancels and steps.

    The shape of a product may decide how a device rounds it. So each program has one number of rows. The length of a
    context decides the chunks in which it is read, and the pool of its row. When a row outgrows its pool, its context
    is read again in the next pool.
    """

    def __init__(self, model: Model, slots: int, vocab_size: int | None = None, prefix_bytes: int = 0):
        """prefix_bytes: of each device, for the chunks of contexts that others begin with too; needs dp and cp of 1."""
        check_stages(model)
        parallel = model.config.parallel
        can_store = prefix_bytes and parallel.dp == parallel.cp == 1  # else a chunk is not on all devices of a row
        self.prefixes = PrefixCache(prefix_bytes * parallel.mp) if can_store else None
        self.config, self.vocab_size = model.config.model, vocab_size or model.config.model.vocab
        self.programs = SlotPrograms(model, slots)
        sizes = [SMALLEST_POOL]
        while sizes[-1] < self.config.seq:
            sizes.append(4 * sizes[-1])
        sizes = [min(size, self.config.seq) for size in sizes]
        self._pools = [SlotPool(self.programs, size, parallel.dp, self.vocab_size, self.prefixes) for size in sizes]
        self._sizes = [pool.size for pool in self._pools]
        self._waiting: collections.deque[Job] = collections.deque()
        self._arrivals = itertools.count()
        self._clock = 0  # tokens of contexts that were read, padding included
        self._draws = itertools.count(1)
        self._last_draw: dict[tuple[int, int], int] = {}  # of each pool and weights
        self.passes = 0  # over the model's layers, by which the last step drew

    def load(self, params, name: str = "", programs: SlotPrograms | None = None, donate: bool = False) -> Weights:
        """Returns the parameters in the form for decoding, by default those of the engine's model.

        donate: delete the stacked arrays of the layers; the caller needs them no more.
        """
        return Weights((programs or self.programs).unstack(params, donate), name, programs)

    def make_programs(self, model: Model) -> SlotPrograms:
        """Returns programs of another model for the same rows; its caches have the same shapes."""
        return SlotPrograms(model, self.programs.rows)

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
        check_prompts([job.prompt], self.vocab_size)
        if (job.scores_prompt or job.pooling) and len(job.prompt) > self.config.seq:
            raise UsageError(
                f"a prompt of {len(job.prompt)} tokens is longer than the context, {self.config.seq}; shorten it"
            )
        job.arrival = next(self._arrivals)
        self._prepare(job)
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
        if self.prefixes:
            self.prefixes.clear()
        return jobs

    def step(self, read_budget: float = LONGEST_CHUNK, count: int = CHUNK) -> list[Job]:
        """Reads chunks of contexts up to a number of tokens, then draws up to `count` tokens; returns ended jobs.

        A small chunk counts as a third of the longest: on a CPU, 16 chunks of 16 tokens take twice as long as one of
        256, and the first of these requests would wait for all of them.
        Rows of one pool and one model are drawn together. A step draws for one such group only, so that a new request
        waits for one draw and one chunk.
        """
        self._admit()
        ended: list[Job] = []
        while read_budget > 0 and (first := self._choose_reader()):
            pool, reading = first
            tokens = pool.read(reading)
            read_budget -= max(tokens, -(-self.programs.longest_chunk // 3))
            self._clock += tokens
            ended += self._collect()
        self.passes = 0
        if group := self._choose_group():
            pool, jobs = group
            if self._choose_reader() or any(not job.ids for job in jobs):  # a chunk or a first token should not wait
                count = 1
            self._last_draw[pool.size, id(jobs[0].weights)] = next(self._draws)
            self.passes = pool.draw(jobs[0].weights, jobs, count)
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
        """Returns a pool with jobs that read and these jobs, the most urgent first."""
        readers = [(pool, [job for job in pool.running if job.reading]) for pool in self._pools]
        readers = [(pool, sorted(jobs, key=self._rank)) for pool, jobs in readers if jobs]
        return min(readers, key=lambda reader: self._rank(reader[1][0])) if readers else None

    def _rank(self, job: Job) -> tuple[float, int]:
        """Orders jobs by how late they would be after another chunk, relative to their length.

        So a short prompt waits for one chunk of a long one, and a long prompt for few short ones.
        """
        length = len(job.seen)
        end = self._clock - job.since + length - job.stored + self.programs.longest_chunk
        return -end / length, job.arrival

    def _choose_group(self) -> tuple[SlotPool, list[Job]] | None:
        """Returns a pool and jobs in it that draw with the same weights.

        Those that have waited longest come first; a first token passes a few others.
        """
        groups: dict[tuple[int, int], tuple[SlotPool, list[Job]]] = {}
        for pool in self._pools:
            for job in pool.running:
                if not job.reading:
                    groups.setdefault((pool.size, id(job.weights)), (pool, []))[1].append(job)
        self._last_draw = {name: self._last_draw.get(name, 0) for name in groups}

        def rank(name):
            is_first = any(not job.ids for job in groups[name][1])
            return self._last_draw[name] - 2 * len(groups) * is_first

        return groups[min(groups, key=rank)] if groups else None

    def _prepare(self, job: Job) -> None:
        job.choose_context(self.config, self._sizes)
        job.chunks = self.prefixes.name_chunks(job, self.programs) if self.prefixes else {}
        job.since = self._clock

    def _move(self) -> None:
        """Queues the jobs that have filled their rows, ahead of jobs that have not started."""
        for job in [job for job in self.running if not job.reading and job.room <= 0]:
            self._free(job)
            self._prepare(job)
            self._waiting.appendleft(job)
