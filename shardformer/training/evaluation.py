"""The loss of a split under given parameters."""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardformer.data import Corpus
from shardformer.distributed import processes
from shardformer.training.step import IN_FLIGHT, Trainer


class Evaluation(NamedTuple):
    loss: float  # nats per token
    accuracy: float
    tokens: int
    bytes: int = 0  # of the text that the tokens stand for; 0 where the vocabulary cannot say

    @property
    def nats_per_byte(self) -> float | None:
        """By which vocabularies compare."""
        return self.loss * self.tokens / self.bytes if self.bytes else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats_per_byte / math.log(2) if self.bytes else None

    def to_record(self) -> dict:
        """Its numbers by name, as a file keeps them."""
        per_byte = {"nats_per_byte": self.nats_per_byte, "bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, "accuracy": self.accuracy, "tokens": self.tokens} | (per_byte if self.bytes else {})


class Evaluator:
    """A corpus, and the trainer's compiled sums over it."""

    def __init__(self, trainer: Trainer, corpus: Corpus):
        self.trainer, self.corpus = trainer, corpus

    def evaluate(
        self, split: str, params, limit: int = 0, show: Callable[[int, int], None] = lambda done, total: None
    ) -> Evaluation:
        """Over `limit` batches of a split, or all of it; calls show(batches done, batches in all)."""
        batches = self.corpus.eval_batches(split, self.trainer.config, limit)
        count, total, pending = len(batches), np.zeros(4), deque()
        show(0, count)  # the first batch waits for a compilation
        read = batches.gather(self.trainer.local_rows)
        for done in range(1, count + 1):
            with processes.ending_all_on_failure(raised_on_all=()):  # each process reads rows of its own
                batch = next(read)
            pending.append(self.trainer.sums(params, batch))
            if len(pending) > IN_FLIGHT:
                total += np.array(pending.popleft(), np.float64)
            show(done, count)
        for sums in pending:
            total += np.array(sums, np.float64)
        tokens, nats, correct, size = total.tolist()
        if not tokens:  # of few batches of long prompts, under mask_prompt
            return Evaluation(math.nan, math.nan, 0)
        return Evaluation(nats / tokens, correct / tokens, int(tokens), int(size))

    def count_batches(self, split: str, limit: int = 0) -> int:
        return len(self.corpus.eval_batches(split, self.trainer.config, limit))

    def evaluate_splits(self, splits: tuple[str, ...], params) -> dict[str, Evaluation]:
        """Each split's evaluation, and that of all of them as one text."""
        results = {split: self.evaluate(split, params) for split in splits}
        if len(splits) > 1:
            tokens = sum(result.tokens for result in results.values())
            counted = [result for result in results.values() if result.tokens]
            mean = lambda name: sum(getattr(result, name) * result.tokens for result in counted) / (tokens or math.nan)
            size = sum(result.bytes for result in results.values())
            results |= {" + ".join(splits): Evaluation(mean("loss"), mean("accuracy"), tokens, size)}
        return results
