"""Continuations of the engine, and what they report."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.generator import Continuation, Row, Stop, never_stop
from shardformer.inference.serve.slot_programs import SlotPrograms

SMALLEST_POOL = 128  # tokens of a row in the first pool; each next pool has 4 times as many
SPARE = 16  # tokens that a row can draw at least before it moves on, unless its context is full

Top = list[tuple[int, float]]  # the most likely ids of a position and their log-probabilities
Bias = Callable[[list[int]], np.ndarray]  # from the ids drawn so far to what is added to the next logits


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of one model in the form that decoding reads. Rows of different weights may be in flight."""

    unstacked: Any
    name: str = ""
    programs: SlotPrograms | None = None  # of a model that differs in its adapters or in the form of its weights
    number: int = dataclasses.field(init=False, default_factory=itertools.count().__next__)  # never of two weights


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
    bias: Bias | None = None
    top: int = 0  # most likely tokens to report at each position
    scores_prompt: bool = False  # also report the log-probability of each token of the prompt
    draws: bool = True  # False: only the prompt is scored or embedded
    pooling: str = ""  # last or mean: of the vectors of the prompt's tokens
    watch: Callable[["Job", Tokens], None] | None = None
    pooled: np.ndarray | float = 0.0  # the last vector so far or the sum, [d_model] in float64
    prompt_scores: list[tuple[float, Top]] = dataclasses.field(default_factory=list)  # from its second token on
    arrival: int = 0
    since: int = 0  # the engine's clock when the context was chosen
    size: int = 0  # of its row: see `choose_context`
    slot: int | None = None
    cancelled: bool = False
    failure: Exception | None = None  # of this job only
    seen: list[int] = dataclasses.field(default_factory=list)  # the context that is read
    stored: int = 0  # tokens in the cache
    chunks: dict[int, bytes] = dataclasses.field(default_factory=dict)  # names in the prefix cache, by position
    found_tokens: int = 0  # of the prompt in the prefix cache
    added_tokens: int = 0  # to the prefix cache
    room: int = 0  # tokens to draw until the context must be read again

    @property
    def done(self) -> bool:
        scored = not self.scores_prompt or len(self.prompt_scores) == len(self.prompt) - 1
        scored &= not self.pooling or self.stored == len(self.prompt)
        return self.cancelled or bool(self.failure) or (scored and (not self.draws or self.ended(self.sampling)))

    @property
    def scoring(self) -> bool:
        return self.scores_prompt and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def reading(self) -> bool:
        return self.scoring or self.stored < len(self.seen)

    @property
    def fresh(self) -> bool:
        """Returns whether the logits of the next token are known: all tokens are in the cache, the last one too."""
        return self.stored == len(self.prompt) + len(self.ids) - self.first

    @property
    def remaining(self) -> int:
        return self.sampling.tokens - len(self.ids)

    def choose_context(self, model, sizes: list[int]) -> None:
        """Chooses the context to read, at most `seq` tokens, and the size of its row, on which nothing else has a say.

        A row is read again when it has filled its size, and with longrope when it becomes long.
        """
        self.shorten_context(model.seq, self.sampling.stride)
        self.seen, self.stored = self.context, 0
        length, limit = len(self.seen), model.longest_short_row
        self.size = next((size for size in sizes if length + SPARE <= size), sizes[-1])
        self.room = min(self.size, limit if length <= limit else self.size) - length + 1

    def result(self) -> Continuation:
        return Continuation(self.ids, self.logprobs, self.stopped)


def make_jobs(
    prompts: Iterable[list[int]], sampling: Sampling, weights: Weights, stops: Stop = never_stop
) -> Iterator[Job]:
    """Yields a job for each sample of each prompt."""
    pairs = itertools.product(prompts, range(sampling.samples))
    for number, (prompt, sample) in enumerate(pairs):
        yield Job(number, prompt, sample, sampling=sampling, weights=weights, stops=stops)
