"""The loss of a split under given parameters."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardformer.config import Config
from shardformer.data import Data
from shardformer.devices import processes
from shardformer.model import Sums
from shardformer.tables import format_table
from shardformer.training.trainer import Trainer, choose_steps_ahead


class EvaluationStopped(Exception):
    """A stop was requested before the last batch of an evaluation."""


class Evaluation(NamedTuple):
    """The mean loss and accuracy of some tokens, or of some rows of a user's task."""

    loss: float  # nats per token
    accuracy: float  # NaN if it is not measured
    tokens: int
    bytes: int = 0  # of the text that the tokens stand for; 0 if the vocabulary does not know them
    metrics: Mapping[str, float] = MappingProxyType({})  # the further means of a task, by name

    @property
    def nats_per_byte(self) -> float | None:
        """The loss in a unit that does not depend on the vocabulary."""
        return self.loss * self.tokens / self.bytes if self.bytes else None

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits, in the same unit."""
        nats = self.nats_per_byte
        return None if nats is None else nats / math.log(2)

    def to_record(self, unit: str = "tokens") -> dict:
        """Returns the numbers by name, for a JSON file, without non-finite ones; `unit` names what is counted."""
        per_byte = {"nats_per_byte": self.nats_per_byte, "bits_per_byte": self.bits_per_byte} if self.bytes else {}
        record = {"loss": self.loss, "accuracy": self.accuracy, unit: self.tokens, **per_byte, **self.metrics}
        return {name: value for name, value in record.items() if value is not None and math.isfinite(value)}


class Evaluator:
    """A source of batches, and the trainer's compiled sums over it."""

    def __init__(self, trainer: Trainer, corpus: Data, loss: Callable[[Any], float] | None = None):
        """`loss` computes one from parameters, instead of validation."""
        self.trainer, self.corpus, self.own_loss = trainer, corpus, loss

    @property
    def validates(self) -> bool:
        """True if there is a validation loss."""
        return bool(self.own_loss) or "validation" in self.corpus.held_out

    def evaluate(
        self,
        split: str,
        params,
        limit: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Evaluates `limit` batches of a split, or all of them; calls show(batches done, batches in all).

        Raises EvaluationStopped if `is_stopped` answers True before a batch.
        """
        if self.own_loss:
            return Evaluation(float(self.own_loss(params)), math.nan, 0)
        batches = self.corpus.eval_batches(split, self.trainer.config, limit)
        count, total, ahead = len(batches), np.zeros(()), 1
        pending: deque[Sums] = deque()
        show(0, count)  # the first batch waits for a compilation
        read, settled = batches.gather(self.trainer.local_rows), time.monotonic()
        for done in range(1, count + 1):
            if is_stopped():
                raise EvaluationStopped
            with processes.ending_all_on_failure(raised_on_all=()):  # each process reads different rows
                batch = next(read)
            pending.append(self.trainer.sums(params, batch))
            while len(pending) > ahead:
                total = total + np.array(pending.popleft(), np.float64)
                before, settled = settled, time.monotonic()
                ahead = choose_steps_ahead(settled - before)
            show(done, count)
        for sums in pending:
            total = total + np.array(sums, np.float64)
        tokens, nats, correct, size, *further = np.ravel(total).tolist() if total.ndim else [0.0] * len(Sums._fields)
        if not tokens:  # a few batches of long prompts, with mask_prompt
            return Evaluation(math.nan, math.nan, 0)
        metrics = {self.trainer.model.details[at]: value / tokens for at, value in enumerate(further)}
        return Evaluation(nats / tokens, correct / tokens, int(tokens), int(size), metrics)

    def count_batches(self, split: str, limit: int = 0) -> int:
        """Returns the number of batches that `evaluate` reads."""
        return len(self.corpus.eval_batches(split, self.trainer.config, limit))

    def evaluate_splits(
        self, splits: tuple[str, ...], params, is_stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, Evaluation]:
        """Evaluates each split, and adds the evaluation of all of them as one text."""
        results = {split: self.evaluate(split, params, is_stopped=is_stopped) for split in splits}
        if len(splits) > 1:
            results |= {" + ".join(splits): _join(list(results.values()))}
        return results


def _join(results: list[Evaluation]) -> Evaluation:
    """Returns the evaluation of the tokens of all results together."""
    tokens = sum(result.tokens for result in results)
    counted = [result for result in results if result.tokens]

    means = [{"loss": result.loss, "accuracy": result.accuracy, **result.metrics} for result in counted]
    metrics = {name: sum(mean[name] * result.tokens for mean, result in zip(means, counted, strict=True)) / tokens
               for name in (means[0] if means else ())}  # fmt: skip
    loss, accuracy = (metrics.pop(name, math.nan) for name in ("loss", "accuracy"))
    return Evaluation(loss, accuracy, tokens, sum(result.bytes for result in results), metrics)


def format_losses(losses: dict[str, Evaluation], settings: Config) -> str:
    """Formats a table of the evaluations of splits, with the titles of the objective."""
    objective = settings.objective
    of_loss, of_accuracy, unit = objective.evaluation_titles
    evaluations = list(losses.values())
    columns = {"split": list(losses), of_loss: [f"{objective.show_loss(it.loss):.4f}" for it in evaluations]}
    if not evaluations or not all(math.isnan(it.accuracy) for it in evaluations):
        columns[of_accuracy] = [f"{it.accuracy:.1%}" for it in evaluations]
    columns[unit] = [f"{it.tokens:,}" for it in evaluations]
    if evaluations and all(it.bytes for it in evaluations):
        columns["nats/byte"] = [f"{it.nats_per_byte:.4f}" for it in evaluations]
        columns["bits/byte"] = [f"{it.bits_per_byte:.4f}" for it in evaluations]
    for name in evaluations[0].metrics if evaluations else ():
        columns[name] = [f"{it.metrics[name]:.4g}" for it in evaluations]
    return format_table(list(zip(*columns.values(), strict=True)), list(columns))
