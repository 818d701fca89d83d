"""A pool: rows of one length on the devices, and the programs that read and draw the jobs in them."""

import numpy as np

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.sampling import Drawing
from shardformer.inference.serve.jobs import Job, Tokens, Top, Weights
from shardformer.inference.serve.prefix_cache import PrefixCache, count_tokens
from shardformer.inference.serve.slot_programs import Draws, SlotPrograms, State
from shardformer.model import Chunk


class SlotPool:
    """The rows of at most `size` tokens. A row's bits depend on its request and on `size`, not on other rows."""

    def __init__(
        self, programs: SlotPrograms, size: int, shards: int, vocab_size: int, prefixes: PrefixCache | None = None
    ):
        self.programs, self.size, self.vocab_size, self._prefixes = programs, size, vocab_size, prefixes
        self._shards, self._per_shard = shards, programs.rows // shards
        self._jobs: list[Job | None] = [None] * programs.rows
        self._stored: State | None = None

    @property
    def running(self) -> list[Job]:
        return [job for job in self._jobs if job]

    @property
    def _state(self) -> State:
        if self._stored is None:
            self._stored = self.programs.make_state(self.size)
        return self._stored

    @_state.setter
    def _state(self, state: State | None) -> None:
        self._stored = state

    def add(self, job: Job) -> bool:
        """Gives a job a free slot, if there is one; the shards of dp get equal numbers."""
        free = [slot for slot, other in enumerate(self._jobs) if other is None]
        if not free:
            return False
        job.slot = min(free, key=lambda slot: (slot % self._per_shard, slot))
        self._jobs[job.slot] = job
        return True

    def remove(self, job: Job) -> None:
        if job.slot is not None and self._jobs[job.slot] is job:
            self._jobs[job.slot] = None
            job.slot = None

    def forget(self) -> None:
        """Drops the arrays, which a failed step may have left without memory."""
        self._jobs, self._stored = [None] * len(self._jobs), None

    def read(self, reading: list[Job]) -> int:
        """Reads a chunk of the first job, and of jobs on other shards of dp that need the same program."""
        first = reading[0]
        if self._prefixes and not (first.scoring or first.pooling):
            self._restore(first, self._prefixes)
        size, mode = self._next_chunk(first), (first.scoring, not first.pooling, first.weights)
        chosen: dict[int, Job] = {}
        for job in reading:
            if (
                job.slot is not None
                and self._next_chunk(job) == size
                and (job.scoring, not job.pooling, job.weights) == mode
            ):
                chosen.setdefault(job.slot // self._per_shard, job)
        tokens = np.zeros((self._shards, size), np.int32)
        values = np.zeros((4, self._shards), np.int32)  # row, position, count and length
        for shard, job in chosen.items():
            new = job.seen[job.stored : job.stored + size]
            tokens[shard, : len(new)] = new
            values[:, shard] = (job.slot or 0) % self._per_shard, job.stored, len(new), len(job.seen)
        assert first.weights is not None
        chunk = Chunk(tokens, *values)
        read = self._embed if first.pooling else self._score if first.scoring else self._extend
        read(first.weights, chunk, chosen)
        return size

    def _next_chunk(self, job: Job) -> int:
        return self.programs.choose_chunk(len(job.seen), job.stored)

    def _restore(self, job: Job, prefixes: PrefixCache) -> None:
        """Copies the stored chunks that continue what a job has read into its row."""
        row = np.array([job.slot], np.int32)
        for chunk in prefixes.find(job):
            self._state = self.programs.restore(self._state, row, np.array([job.stored], np.int32), chunk)
            job.stored += count_tokens(chunk)
            job.found_tokens += 0 if job.ids else count_tokens(chunk)  # else a row that has moved is read again

    def _extend(self, weights: Weights, chunk: Chunk, chosen: dict[int, Job]) -> None:
        seen = np.zeros((self._shards, self._state.logits_BV.shape[1]), bool)
        rows = np.full(self._shards, self.programs.rows, np.int32)  # outside, where nothing is replaced
        for shard, job in chosen.items():
            job.stored += int(chunk.count[shard])
            if not job.reading:
                seen[shard, job.seen], rows[shard] = True, job.slot or 0
        programs = weights.programs or self.programs
        self._state = programs.read(weights.unstacked, self._state, chunk, seen, rows)
        if self._prefixes:
            self._store(chunk, chosen[0], self._prefixes)

    def _store(self, chunk: Chunk, job: Job, prefixes: PrefixCache) -> None:
        """Stores the chunk that a job has just read, unless it has padding or is stored."""
        position = int(chunk.position[0])
        if position in job.chunks and job.chunks[position] not in prefixes:
            prefixes.add(job, position, self.programs.take(self._state, chunk))
            job.added_tokens += int(chunk.count[0])

    def _embed(self, weights: Weights, chunk: Chunk, chosen: dict[int, Job]) -> None:
        """Reads a chunk and pools the vectors of its tokens."""
        programs = weights.programs or self.programs
        self._state, last, total = programs.embed(weights.unstacked, self._state, chunk)
        for shard, job in chosen.items():
            if job.pooling == "last":
                job.pooled = last[shard].astype(np.float64)
            else:
                job.pooled = job.pooled + total[shard].astype(np.float64)
            job.stored += int(chunk.count[shard])

    def _score(self, weights: Weights, chunk: Chunk, chosen: dict[int, Job]) -> None:
        """Scores a chunk's tokens. The context is then read by the program of all jobs, so that it has their bits."""
        targets = np.zeros_like(chunk.tokens)
        for shard, job in chosen.items():
            following = job.seen[job.stored + 1 : job.stored + 1 + len(targets[shard])]
            targets[shard, : len(following)] = following
        results = (weights.programs or self.programs).score(weights.unstacked, self._state, chunk, targets)
        self._state, (logprobs, top_ids, top_logprobs) = results
        for shard, job in chosen.items():
            count = min(int(chunk.count[shard]), len(job.seen) - 1 - job.stored)
            for i in range(count):
                top = _pair(top_ids[shard, i], top_logprobs[shard, i], job.top)
                job.prompt_scores.append((float(logprobs[shard, i]), top))
            job.stored += int(chunk.count[shard])
            if not job.scoring:
                job.stored = 0 if job.draws else len(job.seen)

    def draw(self, weights: Weights | None, jobs: list[Job], count: int) -> int:
        """Draws tokens of these jobs, at most `count` each and as many as each still needs.

        Returns the passes over the model: one for each token, but none for the first after a context was read. Such
        first tokens are drawn before the others, so that they wait for no pass.
        """
        biases = self._collect_biases(jobs)
        jobs = [job for job in jobs if not job.failure]
        fresh, others = [job for job in jobs if job.fresh], [job for job in jobs if not job.fresh]
        count = 1 if biases else count  # a bias depends on the token before it
        passes = self._draw(weights, fresh, 1, True, biases) if fresh else 0
        if others:  # in the same call, or a stream of new requests would hold them up
            passes += self._draw(weights, others, 1 if fresh else count, False, biases)
        return passes

    def _collect_biases(self, jobs: list[Job]) -> dict[int, np.ndarray]:
        """Returns the biases by row; a job whose bias fails, such as without any possible token, fails alone."""
        biases: dict[int, np.ndarray] = {}
        for job in jobs:
            try:
                if job.bias:
                    biases[job.slot or 0] = job.bias(job.ids)
            except Exception as error:
                job.failure = error
        return biases

    def _draw(
        self, weights: Weights | None, jobs: list[Job], count: int, fresh: bool, biases: dict[int, np.ndarray]
    ) -> int:
        count = min([count, *(min(job.remaining, job.room) for job in jobs)])
        draws = self._describe(jobs)
        with_top = any(job.top for job in jobs)
        assert weights is not None
        programs = weights.programs or self.programs
        bias_BV = None
        if chosen := [job.slot for job in jobs if job.slot in biases]:
            bias_BV = programs.make_bias()
            for slot in chosen:
                bias_BV[slot, : self.vocab_size] = biases[slot]
        control = count, self.vocab_size, with_top, fresh, bias_BV
        self._state, drawn = programs.draw(weights.unstacked, self._state, draws, *control)
        passes = count - fresh
        for job in jobs:
            job.stored += passes  # the last token is stored by the next draw
            tops = [_pair(drawn.top_ids[job.slot, i], drawn.top_logprobs[job.slot, i], job.top) for i in range(count)]
            ids, logprobs = drawn.ids[job.slot, :count].tolist(), drawn.logprobs[job.slot, :count].tolist()
            self._take(job, ids, logprobs, tops)
        return passes

    def _take(self, job: Job, ids: list[int], logprobs: list[float], tops: list[Top]) -> None:
        before = len(job.ids)
        try:
            new = job.take(ids, logprobs, job.sampling, job.stops)
        except Exception as error:  # of this job's stop condition; the others go on
            job.failure, new = error, []
        job.room -= len(ids)
        if new and job.watch:
            job.watch(job, Tokens(new, job.logprobs[before:], tops[: len(new)]))

    def _describe(self, jobs: list[Job]) -> Draws:
        """Returns the values of every row; rows that draw nothing now write only where they will write next."""
        size = self.programs.rows
        integers = [np.zeros(size, np.int32) for _ in range(6)]
        neutral = Drawing.from_sampling(Sampling(temperature=0))
        rules = Drawing(*(np.full(size, value) for value in neutral))
        for job in self.running:
            integers[3][job.slot] = job.stored
        for job in jobs:
            last = job.ids[-1] if job.ids else job.prompt[-1]
            values = job.sampling.seed, job.sample, len(job.ids), job.stored, 1, last
            for array, value in zip(integers, values, strict=True):
                array[job.slot] = value
            for array, value in zip(rules, Drawing.from_sampling(job.sampling), strict=True):
                array[job.slot] = value
        seed, sample, drawn, position, active, token = integers
        return Draws(seed, sample, drawn, position, active, token, rules)


def _pair(ids: np.ndarray, logprobs: np.ndarray, count: int) -> Top:
    return [(int(i), float(logprob)) for i, logprob in zip(ids[:count], logprobs[:count], strict=True)]
