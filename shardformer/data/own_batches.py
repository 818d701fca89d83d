"""Batches from a notebook, instead of a corpus."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardformer.config import Config
from shardformer.data.batches import EVERY_ROW, Batch, Rows, check_ids
from shardformer.data.vocabulary import TokenIds, Vocabulary
from shardformer.errors import UsageError


class OwnBatches:
    """Training batches and validation batches of the caller, instead of a `Corpus`.

    A batch has int32 arrays `tokens` and `targets` [batch, seq], and may have float32 `weights` of the targets.

    Arguments:
      train: returns the global batches from a step on, counted from 0. A resumed run starts at its step.
      validation: the batches of each evaluation; none if the run has none.
      vocabulary: for samples; by default, token ids below `vocab`.
      name: names the data in the run folder. A resume must bring data of the same name.
    """

    has_chat = has_pairs = False

    def __init__(
        self,
        train: Callable[[int], Iterator[Batch]],
        vocab: int,
        validation: Sequence[Batch] = (),
        vocabulary: Vocabulary | None = None,
        name: str = "own batches",
    ):
        self._train, self._validation = train, validation
        self.name, self.vocabulary = name, vocabulary or TokenIds(vocab)

    @property
    def fingerprint(self) -> str:
        return f"own:{self.name}"

    @property
    def held_out(self) -> tuple[str, ...]:
        return ("validation",) if self._validation else ()

    def separate_documents(self, config: Config) -> Config:
        """Returns the configuration as it is: the caller lays out the rows."""
        return config

    def describe_chat(self, layout) -> Iterator[str]:
        return iter(())

    def train_batches(self, config: Config, first_step: int = 0, rows: Rows = EVERY_ROW) -> "OwnStream":
        """Returns this process's rows of the batches from a step on."""
        return OwnStream(self._train(first_step), self._checker(config, rows), first_step)

    def eval_batches(self, split: str, config: Config, limit: int = 0) -> "OwnEvalBatches":
        """Returns the validation batches, or the first `limit` of them."""
        batches = self._validation[:limit] if limit else self._validation
        return OwnEvalBatches(batches, lambda rows: self._checker(config, rows))

    def _checker(self, config: Config, rows: Rows) -> Callable[[Batch, str], Batch]:
        """Returns a function that checks a global batch and selects rows of it."""
        shape = (config.training.batch, config.model.seq)

        def check(batch: Batch, location: str) -> Batch:
            for name in ("tokens", "targets"):
                got = np.shape(batch[name]) if name in batch else None
                if got != shape:
                    raise UsageError(
                        f"{self.name}, {location}: {name} has the shape {got}, expected (batch, seq) = {shape}"
                    )
            ids = {name: np.asarray(batch[name], np.int32) for name in ("tokens", "targets")}
            rest = {name: np.asarray(values) for name, values in batch.items() if name not in ids}
            selected = {name: values[rows] for name, values in (ids | rest).items()}
            return check_ids(selected, len(self.vocabulary), f"{self.name}, {location}")

        return check


class OwnStream:
    """An iterator over checked training batches."""

    def __init__(self, batches: Iterator[Batch], check: Callable[[Batch, str], Batch], first_step: int):
        self._batches, self._check = iter(batches), check
        self._steps = itertools.count(first_step)

    def __iter__(self) -> "OwnStream":
        return self

    def __next__(self) -> Batch:
        step = next(self._steps)
        try:
            batch = next(self._batches)
        except StopIteration:
            message = f"the iterator of batches ended at step {step}; give steps={step}, or more batches"
            raise UsageError(message) from None
        return self._check(batch, f"step {step}")

    def close(self) -> None:
        if close := getattr(self._batches, "close", None):
            close()


class OwnEvalBatches:
    """The validation batches of one evaluation."""

    def __init__(self, batches: Sequence[Batch], checker: Callable[[Rows], Callable[[Batch, str], Batch]]):
        self._batches, self._checker = batches, checker

    def __len__(self) -> int:
        return len(self._batches)

    def gather(self, rows: Rows = EVERY_ROW) -> Iterator[Batch]:
        """Yields each batch with weights; by default, every target counts."""
        check = self._checker(rows)
        for number, batch in enumerate(self._batches):
            result = check(batch, f"validation batch {number}")
            yield {"weights": np.ones(result["targets"].shape, np.float32)} | result
