"""Batches from a notebook, instead of a corpus."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from shardformer.config import Config
from shardformer.data.batches import EVERY_ROW, Batch, BatchStream, Data, Rows
from shardformer.data.digests import OWN
from shardformer.data.vocabulary import TokenIds, Vocabulary
from shardformer.errors import UsageError

IGNORED = -100  # a target without a loss, as in PyTorch and Hugging Face
NAMES = ("tokens", "targets", "weights", "documents")  # of the arrays of a batch


class OwnBatches(Data):
    """Training batches and validation batches of the caller, instead of a `Corpus`.

    For a user's task, a batch has the arrays of `Task.rows`. For the language model, a batch has integer arrays
    `tokens` and `targets` [batch, seq], and may have `weights` of the targets. The weight of a target of -100 is 0.
    Attention stays within each document of a batch with `documents` [batch, seq].

    >>> import numpy as np
    >>> from shardformer import OwnBatches, preset
    >>> def count_up(step):
    ...     while True:
    ...         tokens = (np.arange(17) + step) % 50 + np.zeros((8, 1), int)
    ...         yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    ...         step += 1
    >>> own = OwnBatches(count_up, vocab=50)
    >>> next(own.train_batches(preset("tiny")))["tokens"].shape
    (8, 16)

    Arguments:
      train: returns the global batches from a step on, counted from 0. A resumed run starts at its step.
      validation: the batches of each evaluation; none if the run has none.
      vocab: the number of token ids.
      vocabulary: for samples; by default, token ids below `vocab`.
      check: checks a batch of a task; a session knows it.
      name: names the data in the run folder. A resume must bring data of the same name.
    """

    def __init__(
        self,
        train: Callable[[int], Iterator[Batch]],
        vocab: int = 1,
        validation: Iterable[Batch] = (),
        vocabulary: Vocabulary | None = None,
        name: str = "own batches",
        check: Callable[[Batch], Batch] | None = None,
    ):
        self._check_arrays = check
        self._train, self._validation = train, list(validation)  # read by every evaluation
        self.name, self.vocabulary = name, vocabulary or TokenIds(vocab)

    def with_check(self, check: Callable[[Batch], Batch]) -> "OwnBatches":
        """Returns the same batches, which this function checks instead: those of a task."""
        return OwnBatches(self._train, validation=self._validation, name=self.name, check=check)

    @property
    def fingerprint(self) -> str:
        return f"{OWN}{self.name}"

    @property
    def held_out(self) -> tuple[str, ...]:
        return ("validation",) if self._validation else ()

    def has_known_arrays(self, config: Config) -> bool:
        """Returns whether the batches are checked as a task's; a batch of tokens may have weights."""
        return self._check_arrays is not None

    def train_batches(self, config: Config, first_step: int = 0, rows: Rows = EVERY_ROW) -> "OwnStream":
        """Returns this process's rows of the batches from a step on."""
        return OwnStream(self._train(first_step), self._checker(config, rows), first_step)

    def eval_batches(self, split: str, config: Config, limit: int = 0) -> "OwnEvalBatches":
        """Returns the validation batches, or the first `limit` of them."""
        batches = self._validation[:limit] if limit else self._validation
        return OwnEvalBatches(batches, lambda rows: self._checker(config, rows))

    def _checker(self, config: Config, rows: Rows) -> Callable[[Batch, str], Batch]:
        """Returns a function that checks a global batch and selects rows of it."""
        shape, size = (config.training.batch, config.model.seq), len(self.vocabulary)

        def check(batch: Batch, location: str) -> Batch:
            try:
                arrays = self._check_arrays(batch) if self._check_arrays else check_batch(batch, shape, size)
            except UsageError as error:
                raise UsageError(f"{self.name}, {location}: {error}") from None
            return {name: values[rows] for name, values in arrays.items()}

        return check


class OwnStream(BatchStream):
    """An iterator over checked training batches."""

    def __init__(self, batches: Iterator[Batch], check: Callable[[Batch, str], Batch], first_step: int):
        self._batches, self._check = iter(batches), check
        self._steps = itertools.count(first_step)

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
            weights = {"weights": np.ones(result["targets"].shape, np.float32)} if "targets" in result else {}
            yield weights | result


def check_batch(batch: Batch, shape: tuple[int, int], vocab_size: int) -> Batch:
    """Returns the arrays of a batch in the types of a step, with weights if targets are ignored.

    Raises UsageError for another shape, type or id: a device would use the nearest embedding in silence.
    """
    if unknown := batch.keys() - NAMES:
        raise UsageError(f"a batch has {', '.join(NAMES)}, got {', '.join(sorted(map(repr, unknown)))}; leave it out")
    arrays = {name: np.asarray(values) for name, values in batch.items()}
    for name in ("tokens", "targets", *batch):
        got = arrays[name].shape if name in arrays else None
        if got != shape:
            raise UsageError(f"{name} has the shape {got}, expected (batch, seq) = {shape}")
        if name != "weights" and arrays[name].dtype.kind not in "iu":
            raise UsageError(f"{name} has the type {arrays[name].dtype}, expected integers; give np.int32")
    if "weights" in arrays:
        arrays["weights"] = _check_weights(arrays["weights"])
    ignored = arrays["targets"] == IGNORED
    if ignored.any():
        arrays["weights"] = np.where(ignored, 0, arrays.get("weights", 1))
        arrays["targets"] = np.where(ignored, 0, arrays["targets"])
    _check_ids("tokens", arrays["tokens"], vocab_size, "")
    _check_ids("targets", arrays["targets"], vocab_size, f", or {IGNORED} for a target without a loss")
    return {
        name: values.astype(np.float32 if name == "weights" else np.int32, copy=False)
        for name, values in arrays.items()
    }


def _check_weights(weights: np.ndarray) -> np.ndarray:
    """Returns float32 weights; raises UsageError for one by which a loss is not finite, or a target is unlearned."""
    try:
        with np.errstate(over="ignore"):
            result = weights.astype(np.float32)
    except (TypeError, ValueError):
        raise UsageError(f"weights has the type {weights.dtype}, expected numbers; give np.float32") from None
    wrong = np.argwhere(~((result >= 0) & np.isfinite(result)))
    if len(wrong):
        row, column = wrong[0]
        raise UsageError(
            f"weights[{row}, {column}] is {weights[row, column]}, expected a finite number of at least 0; give 0 for a "
            "target without a loss"
        )
    return result


def _check_ids(name: str, ids: np.ndarray, vocab_size: int, alternative: str) -> None:
    """Raises UsageError for an id beyond the vocabulary, with its position."""
    if ids.min() >= 0 and ids.max() < vocab_size:
        return
    row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
    raise UsageError(
        f"{name}[{row}, {column}] is {ids[row, column]}, expected an id from 0 to {vocab_size - 1}{alternative}; give "
        "the ids of the vocabulary, or OwnBatches a larger vocab"
    )
