"""Training batches of which some are bad: targets of one token, or a weight that is not a number."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np

from shardformer.data import Corpus
from shardformer.training.rolling_guard import RollingGuard

SPIKE, NAN = "spike", "nan"


class _BadBatches:
    def __init__(self, batches, bad: dict[int, str], first_step: int):
        self._batches, self._bad, self._step = batches, bad, first_step
        self.close = batches.close

    def __iter__(self):
        return self

    def __next__(self) -> dict:
        self._step += 1
        batch = dict(next(self._batches))
        weights = np.ones(batch["tokens"].shape, np.float32)
        if self._bad.get(self._step) == NAN:
            weights[0, 0] = np.nan
        if self._bad.get(self._step) == SPIKE:
            batch["targets"] = np.full_like(batch["targets"], 5)
        return batch | {"weights": weights}


@contextlib.contextmanager
def bad_batches(bad: dict[int, str]) -> Iterator[None]:
    """Spoils the batches of these steps within the block, in which skip_steps compares with the last 16 steps only."""
    make = Corpus.train_batches

    def make_bad(corpus, config, first_step, rows):
        return _BadBatches(make(corpus, config, first_step, rows), bad, first_step)

    with mock.patch.object(Corpus, "train_batches", make_bad), mock.patch.object(RollingGuard, "window", 16):
        yield
