"""Continuous batching: continuations join and leave the slots of one KV cache between two compiled steps. Host side."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer.errors import UsageError
from shardformer.inference.generator import CHUNK, SMALLEST_CACHE, Continuation, Row, Stop, never_stop, round_up
from shardformer.inference.sampling import Drawing, Sampling
from shardformer.inference.serve.slot_programs import LONGEST_CHUNK, Draws, SlotPrograms, State
from shardformer.model import Chunk, Model

Top = list[tuple[int, float]]  # the most likely ids of a position and their log-probabilities


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of one model in the form that decoding reads. Rows of different weights may be in flight."""

    unstacked: Any
    name: str = ""


class Tokens(NamedTuple):
    """New tokens of a job."""

    ids: list[int]
    logprobs: list[float]
    tops: list[Top]


@dataclasses.dataclass(eq=False)
class Job(Row):
    """A continuation that waits, reads its context, draws tokens or has ended."""

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    weights: Weights | None = None
    stops: Stop = never_stop
    top: int = 0  # most likely tokens to report at each position
    scores_prompt: bool = False  # also report the log-probability of each token of the prompt
    draws: bool = True  # False: only the prompt is scored
    watch: Callable[["Job", Tokens], None] | None = None
    prompt_scores: list[tuple[float, Top]] = dataclasses.field(default_factory=list)  # from its second token on
    slot: int | None = None
    cancelled: bool = False
    failure: Exception | None = None  # of this job only
    seen: list[int] = dataclasses.field(default_factory=list)  # the context that is read
    stored: int = 0  # tokens in the cache
    room: int = 0  # tokens to draw until the context must be read again

    @property
    def done(self) -> bool:
        scored = not self.scores_prompt or len(self.prompt_scores) == len(self.prompt) - 1
        return self.cancelled or bool(self.failure) or (scored and (not self.draws or self.ended(self.sampling)))

    @property
    def scoring(self) -> bool:
        return self.scores_prompt and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def reading(self) -> bool:
        return self.scoring or self.stored < len(self.seen)

    @property
    def remaining(self) -> int:
        return self.sampling.tokens - len(self.ids)

    def start_reading(self, model) -> None:
        """Chooses the context to read: at most `seq` tokens; longrope reads a row again when it becomes long."""
        self.shorten_context(model.seq, self.sampling.stride)
        self.seen, self.stored = self.context, 0
        limit = model.longest_short_row
        self.room = (limit if len(self.seen) <= limit else model.seq) - len(self.seen) + 1

    def result(self) -> Continuation:
        return Continuation(self.ids, self.logprobs, self.stopped)


class Engine:
    """The rows of one model. Not thread-safe: one thread submits, cancels and steps."""

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
        self._jobs: list[Job | None] = [None] * self.programs.rows
        self._waiting: collections.deque[Job] = collections.deque()
        self._state: State | None = None
        self._size = 0  # tokens that the caches hold
        # On a CPU a longer cache adds exact zeros to the sums of a row; other devices may choose other kernels for it.
        self._grows = jax.default_backend() == "cpu"

    def load(self, params, name: str = "") -> Weights:
        """Returns the parameters in the form for decoding."""
        return Weights(self.programs.unstack(params), name)

    @property
    def running(self) -> list[Job]:
        return [job for job in self._jobs if job]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self._jobs)

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
        self._waiting.append(job)

    def cancel(self, job: Job) -> None:
        """Frees the slot of a job, or takes it out of the queue."""
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        self._free(job)

    def reset(self) -> list[Job]:
        """Drops all jobs and the caches, which a failed step may have left without memory; returns the jobs."""
        jobs = [*self.running, *self._waiting]
        for job in self.running:
            self._free(job)
        self._waiting.clear()
        self._state = None
        return jobs

    def step(self, read_budget: float = LONGEST_CHUNK, count: int = CHUNK) -> list[Job]:
        """Reads chunks of contexts up to a number of tokens, draws up to `count` tokens; returns ended jobs."""
        self._admit()
        ended: list[Job] = []
        while read_budget > 0 and (reading := [job for job in self.running if job.reading]):
            read_budget -= self._read(sorted(reading, key=lambda job: job.number))
            ended += self._collect()
        active = [job for job in self.running if not job.reading]
        for weights in {id(job.weights): job.weights for job in active}.values():
            self._draw(weights, [job for job in active if job.weights is weights], count)
        return ended + self._collect()

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yields jobs in their order when they have ended; holds at most a queue of them that fills the slots."""
        jobs = iter(jobs)
        order: collections.deque[Job] = collections.deque()
        while True:
            while self.waiting + len(self.running) < self.programs.rows and (job := next(jobs, None)):
                self.submit(job)
                order.append(job)
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
        if job.slot is not None:
            self._jobs[job.slot] = None
            job.slot = None

    def _admit(self) -> None:
        """Moves waiting jobs into free slots; the shards of dp get equal numbers."""
        free = [slot for slot, job in enumerate(self._jobs) if job is None]
        free.sort(key=lambda slot: (slot % self._per_shard, slot))
        for slot in free[: len(self._waiting)]:
            job = self._waiting.popleft()
            self._jobs[slot], job.slot = job, slot
            job.start_reading(self.config)
            self._make_room(min(len(job.seen) + job.remaining, self.config.seq))

    def _make_room(self, tokens: int) -> None:
        size = min(round_up(tokens, SMALLEST_CACHE), self.config.seq) if self._grows else self.config.seq
        if self._state is None:
            self._state, self._size = self.programs.make_state(size), size
        elif size > self._size:
            self._state, self._size = self.programs.grow(self._state, size), size

    def _read(self, reading: list[Job]) -> int:
        """Reads a chunk of the first job, and of jobs on other shards of dp that need the same program."""
        first = reading[0]
        size, mode = self._next_chunk(first), (first.scoring, first.weights)
        chosen: dict[int, Job] = {}
        for job in reading:
            if job.slot is not None and self._next_chunk(job) == size and (job.scoring, job.weights) == mode:
                chosen.setdefault(job.slot // self._per_shard, job)
        tokens = np.zeros((self._shards, size), np.int32)
        values = np.zeros((4, self._shards), np.int32)  # row, position, count and length
        for shard, job in chosen.items():
            new = job.seen[job.stored : job.stored + size]
            tokens[shard, : len(new)] = new
            values[:, shard] = (job.slot or 0) % self._per_shard, job.stored, len(new), len(job.seen)
        assert first.weights is not None
        chunk = Chunk(tokens, *values)
        (self._score if first.scoring else self._extend)(first.weights, chunk, chosen)
        return size

    def _next_chunk(self, job: Job) -> int:
        return self.programs.choose_chunk(len(job.seen) - job.stored)

    def _extend(self, weights: Weights, chunk: Chunk, chosen: dict[int, Job]) -> None:
        seen = np.zeros((self._shards, self._state_width), bool)
        rows = np.full(self._shards, self.programs.rows, np.int32)  # outside, where nothing is replaced
        for shard, job in chosen.items():
            job.stored += int(chunk.count[shard])
            if not job.reading:
                seen[shard, job.seen], rows[shard] = True, job.slot or 0
        assert self._state is not None
        self._state = self.programs.read(weights.unstacked, self._state, chunk, seen, rows)

    @property
    def _state_width(self) -> int:
        return self._state.logits_BV.shape[1] if self._state else 0

    def _score(self, weights: Weights, chunk: Chunk, chosen: dict[int, Job]) -> None:
        """Scores a chunk's tokens. The context is then read by the program of all jobs, so that it has their bits."""
        targets = np.zeros_like(chunk.tokens)
        for shard, job in chosen.items():
            following = job.seen[job.stored + 1 : job.stored + 1 + len(targets[shard])]
            targets[shard, : len(following)] = following
        assert self._state is not None
        results = self.programs.score(weights.unstacked, self._state, chunk, targets)
        self._state, (logprobs, top_ids, top_logprobs) = results
        for shard, job in chosen.items():
            count = min(int(chunk.count[shard]), len(job.seen) - 1 - job.stored)
            for i in range(count):
                top = _pair(top_ids[shard, i], top_logprobs[shard, i], job.top)
                job.prompt_scores.append((float(logprobs[shard, i]), top))
            job.stored += int(chunk.count[shard])
            if not job.scoring:
                job.stored = 0 if job.draws else len(job.seen)

    def _draw(self, weights: Weights | None, jobs: list[Job], count: int) -> None:
        """Draws tokens of these jobs, at most `count` each and as many as each still needs."""
        count = min([count, *(min(job.remaining, job.room) for job in jobs)])
        draws = self._describe(jobs)
        with_top = any(job.top for job in jobs)
        assert weights is not None
        assert self._state is not None
        self._state, drawn = self.programs.draw(weights.unstacked, self._state, draws, count, self.vocab_size, with_top)
        for job in jobs:
            tops = [_pair(drawn.top_ids[job.slot, i], drawn.top_logprobs[job.slot, i], job.top) for i in range(count)]
            ids, logprobs = drawn.ids[job.slot, :count].tolist(), drawn.logprobs[job.slot, :count].tolist()
            self._take(job, ids, logprobs, tops)

    def _take(self, job: Job, ids: list[int], logprobs: list[float], tops: list[Top]) -> None:
        before = len(job.ids)
        try:
            new = job.take(ids, logprobs, job.sampling, job.stops)
        except Exception as error:  # of this job's stop condition; the others go on
            job.failure, new = error, []
        job.stored += len(ids)
        job.room -= len(ids)
        if new and job.watch:
            job.watch(job, Tokens(new, job.logprobs[before:], tops[: len(new)]))
        if not job.done and job.room <= 0:
            job.start_reading(self.config)

    def _describe(self, jobs: list[Job]) -> Draws:
        """Returns the values of every row; rows that draw nothing now write only where they will write next."""
        size = self.programs.rows
        integers = [np.zeros(size, np.int32) for _ in range(5)]
        neutral = Drawing.from_sampling(Sampling(temperature=0))
        rules = Drawing(*(np.full(size, value) for value in neutral))
        for job in self.running:
            integers[3][job.slot] = job.stored
        for job in jobs:
            values = job.sampling.seed, job.sample, len(job.ids), job.stored, 1
            for array, value in zip(integers, values, strict=True):
                array[job.slot] = value
            for array, value in zip(rules, Drawing.from_sampling(job.sampling), strict=True):
                array[job.slot] = value
        seed, sample, drawn, position, active = integers
        return Draws(seed, sample, drawn, position, active, rules)


def _pair(ids: np.ndarray, logprobs: np.ndarray, count: int) -> Top:
    return [(int(i), float(logprob)) for i, logprob in zip(ids[:count], logprobs[:count], strict=True)]


def make_jobs(
    prompts: Iterable[list[int]], sampling: Sampling, weights: Weights, stops: Stop = never_stop
) -> Iterator[Job]:
    """Yields a job for each sample of each prompt."""
    pairs = itertools.product(prompts, range(sampling.samples))
    for number, (prompt, sample) in enumerate(pairs):
        yield Job(number, prompt, sample, sampling=sampling, weights=weights, stops=stops)
