"""The loss of a split under given parameters."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardformer import data
from shardformer.data import Corpus, Vocabulary
from shardformer.training.step import IN_FLIGHT, Trainer


class Evaluation(NamedTuple):
    loss: float  # nats per token
    accuracy: float
    tokens: int


class Evaluator:
    """A corpus as token ids, and the trainer's compiled sums over them."""

    def __init__(self, trainer: Trainer, corpus: Corpus, vocabulary: Vocabulary):
        self.trainer = trainer
        encode = lambda split: vocabulary.encode(getattr(corpus, split), source=f"{split} split of {corpus.name}")
        self.ids = {split: encode(split) for split in ("train", "validation", "test")}

    def evaluate(
        self, split: str, params, limit: int = 0, show: Callable[[int, int], None] = lambda done, total: None
    ) -> Evaluation:
        """Over `limit` batches of a split, or all of it; calls show(batches done, batches in all)."""
        count, total, pending = self.count_batches(split, limit), np.zeros(3), deque()
        show(0, count)  # the first batch waits for a compilation
        batches = data.eval_batches(self.ids[split], rows=self.trainer.rows, **self._batch_shape(limit))
        for done, batch in enumerate(batches, start=1):
            pending.append(self.trainer.sums(params, batch))
            if len(pending) > IN_FLIGHT:
                total += np.array(pending.popleft(), np.float64)
            show(done, count)
        for sums in pending:
            total += np.array(sums, np.float64)
        tokens, nats, correct = total.tolist()
        return Evaluation(nats / tokens, correct / tokens, int(tokens))

    def count_batches(self, split: str, limit: int = 0) -> int:
        return data.eval_batch_count(self.ids[split], **self._batch_shape(limit))

    def _batch_shape(self, limit: int) -> dict[str, int]:
        return {"seq": self.trainer.config.seq, "batch": self.trainer.config.batch, "limit": limit}

    def evaluate_splits(self, splits: tuple[str, ...], params) -> dict[str, Evaluation]:
        """Each split's evaluation, and that of all of them as one text."""
        results = {split: self.evaluate(split, params) for split in splits}
        if len(splits) > 1:
            tokens = sum(result.tokens for result in results.values())
            mean = lambda name: sum(getattr(result, name) * result.tokens for result in results.values()) / tokens
            results |= {" + ".join(splits): Evaluation(mean("loss"), mean("accuracy"), tokens)}
        return results
