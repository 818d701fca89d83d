"""The data of a run as batches, which are made of windows.

A batch is a function of (seed, step), and each process gathers only its local rows.
"""

import abc
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from shardformer.config import Config
from shardformer.data.order import Mixture, epoch_order, epoch_shift, scramble
from shardformer.data.vocabulary import MAX_IDS, Vocabulary
from shardformer.data.windows import AnySplit, Batch, RowLayout, Windows
from shardformer.errors import RunError, UsageError

PREFETCH = 4  # batches ready ahead of the device
Rows = slice | np.ndarray
EVERY_ROW = slice(None)


class Data(abc.ABC):
    """The data of a run: a `Corpus`, or the `OwnBatches` of a program. By default, they are made of no texts."""

    name: str
    vocabulary: Vocabulary

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Equal if and only if the data is equal."""

    @property
    @abc.abstractmethod
    def held_out(self) -> tuple[str, ...]:
        """The splits that a run is evaluated on: those with a target."""

    def separate_documents(self, config: Config) -> Config:
        """Returns a configuration whose conversations never see each other; without packing, a row has one pair.

        Raises UsageError for an objective that learns from other data.
        """
        config.objective.check_source(self.name, has_pairs=False)
        return config

    def describe_rows(self, config: Config) -> Iterator[str]:
        """Yields a line for every source of conversations: how they are laid out in rows."""
        return iter(())

    def named_splits(self) -> dict[str, AnySplit]:
        """Returns the splits by `SOURCE/SPLIT`."""
        return {}

    def with_splits(self, splits: dict[str, AnySplit]) -> "Data":
        """Returns the data with these of the named splits only, as they are given."""
        return self

    @abc.abstractmethod
    def has_known_arrays(self, config: Config) -> bool:
        """Returns whether the arrays of each training batch are those of the model's `batch_shapes`, and no further."""

    @abc.abstractmethod
    def train_batches(self, config: Config, first_step: int = 0, rows: Rows = EVERY_ROW) -> "BatchStream":
        """Returns batches without end from a step on; `rows` are those of the global batch to gather."""

    @abc.abstractmethod
    def eval_batches(self, split: str, config: Config, limit: int = 0) -> "Evaluated":
        """Returns the batches of a split, or `limit` of them."""


class Evaluated(Protocol):
    """The batches of one evaluation."""

    def __len__(self) -> int: ...

    def gather(self, rows: Rows = EVERY_ROW) -> Iterator[Batch]:
        """Yields the rows of each batch, with weights."""


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The rows of one step that one source gives."""

    positions: np.ndarray  # in the endless sequence of the source's rows
    seed: int
    step: int
    batch: int  # rows of the global batch
    rows: Rows  # of the global batch that this process gathers


ShiftedRows = tuple[np.ndarray, np.ndarray]  # (rows of the windows, how far each is shifted)


def _choose_by_epoch(windows: Windows, step_rows: StepRows) -> ShiftedRows:
    epochs, indices = epoch_order(step_rows.positions, windows.count, step_rows.seed)
    return indices, epoch_shift(epochs, windows.slack, step_rows.seed)


def _choose_at_random(windows: Windows, step_rows: StepRows) -> ShiftedRows:
    return windows.draw(step_rows.positions, step_rows.seed)


def _choose_as_stored(windows: Windows, step_rows: StepRows) -> ShiftedRows:
    indices = windows.rows_in_file_order(step_rows.step, step_rows.batch)[step_rows.rows]
    return indices, np.zeros_like(indices)


ORDERS: dict[str, Callable[[Windows, StepRows], ShiftedRows]] = {
    "epoch": _choose_by_epoch,
    "random": _choose_at_random,
    "file": _choose_as_stored,
}


class TrainBatches:
    """The batch of any step. `splits` are mixed by `weights`; `order` is a key of ORDERS (see Config.windows)."""

    def __init__(
        self,
        splits: Sequence[AnySplit],
        weights: Sequence[float],
        layout: RowLayout,
        *,
        batch: int,
        seed: int,
        order: str = "epoch",
    ):
        self.windows = [split.make_windows(layout) for split in splits]
        self.layout, self.batch, self.seed, self.order = layout, batch, seed, order
        self._mixture = Mixture(weights, seed) if len(splits) > 1 else None
        for split, windows in zip(splits, self.windows, strict=True):
            _check_length(split, windows, layout)
            if order == "file" and self._mixture:
                raise UsageError("order=file reads one source in its order; with several in data= give order=epoch")

    def __call__(self, step: int, rows: Rows = EVERY_ROW) -> Batch:
        """Returns int32 `tokens` and `targets` of [rows, seq]; `rows` are those of the global batch to gather."""
        positions = step * self.batch + np.arange(self.batch, dtype=np.int64)[rows]
        if not self._mixture:
            return self._gather(0, StepRows(positions, self.seed, step, self.batch, rows))
        sources, positions = self._mixture.locate(positions)

        def gather(source: int, selected: np.ndarray) -> Batch:
            seed = int(scramble(self.seed, source)[0] >> np.uint64(1))  # each source has a separate order
            return self._gather(source, StepRows(positions[selected], seed, step, self.batch, rows))

        return _join_sources(sources, gather)

    def _gather(self, source: int, step_rows: StepRows) -> Batch:
        windows = self.windows[source]
        indices, shifts = ORDERS[self.order](windows, step_rows)
        return windows.gather(indices, shifts, weighted=self.layout.weighs_targets)


class BatchStream(Iterator[Batch]):
    """An endless iterator over training batches."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the threads. The garbage collector could do so within one of them, which would wait for itself."""


def stream(make: Callable[[int], Batch], first_step: int, through_tf: bool) -> BatchStream:
    """Returns an endless iterator over the batches from a step on, which tf.data or a thread makes ahead of time.

    tf.data carries TFRecords and the texts of TensorFlow Datasets. All other data uses a thread: twice the tokens per
    CPU-second of tf.data around the same function, and TensorFlow is not imported.
    """
    return _TfDataBatches(make, first_step) if through_tf else _ThreadedBatches(make, first_step)


class _TfDataBatches(BatchStream):
    """An iterator over a tf.data.Dataset, closed before the interpreter ends: TensorFlow would wait forever."""

    def __init__(self, make: Callable[[int], Batch], first_step: int):
        from shardformer.data.tensorflow import import_tensorflow  # not imported without texts of TensorFlow Datasets

        tf = import_tensorflow()
        first = make(first_step)
        names, types = tuple(first), [tf.as_dtype(values.dtype) for values in first.values()]
        failures: list[Exception] = []
        self._failures = failures

        def gather(step) -> list[np.ndarray]:
            try:
                batch = make(int(step))
            except Exception as error:  # TensorFlow would wrap this with its full stack trace
                failures.append(error)
                raise
            return [batch[name] for name in names]

        def build(step):
            arrays = tf.numpy_function(gather, [step], types)
            for array, name in zip(arrays, names, strict=True):
                array.set_shape(first[name].shape)
            return dict(zip(names, arrays, strict=True))

        dataset = tf.data.Dataset.counter(start=first_step).map(build).prefetch(PREFETCH)
        self._iterators = [dataset.as_numpy_iterator()]
        weakref.finalize(self, self._iterators.clear)

    def close(self) -> None:
        self._iterators.clear()

    def __next__(self) -> Batch:
        try:
            return next(self._iterators[0])
        except Exception:
            if self._failures:
                raise self._failures[0] from None
            raise


class _ThreadedBatches(BatchStream):
    """An iterator with a thread that stays PREFETCH batches ahead and ends with the iterator."""

    def __init__(self, make: Callable[[int], Batch], first_step: int):
        self._ready: queue.Queue = queue.Queue(PREFETCH)
        self._ended = threading.Event()
        threading.Thread(target=_fill, args=(make, first_step, self._ready, self._ended), daemon=True).start()

    def __next__(self) -> Batch:
        result = self._ready.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._ended.set()

    __del__ = close


def _fill(make: Callable[[int], Batch], step: int, ready: queue.Queue, ended: threading.Event) -> None:
    """Puts batches into a queue. Has no reference to the iterator, so that collecting it stops this thread."""
    while not ended.is_set():
        try:
            batch: Batch | Exception = make(step)
        except Exception as error:  # to be raised where the batch is asked for
            batch = error
        while not ended.is_set():
            try:
                ready.put(batch, timeout=1)
                break
            except queue.Full:
                continue
        if isinstance(batch, Exception):
            return
        step += 1


class EvalBatches:
    """All of a split: every target once, with weight 1; padding has weight 0.

    `limit` > 0 selects that many batches, spread over the split. `byte_lengths` are those of the vocabulary's ids.
    """

    def __init__(
        self,
        splits: Sequence[AnySplit],
        layout: RowLayout,
        *,
        batch: int,
        limit: int = 0,
        byte_lengths: np.ndarray | None = None,
        vocab_size: int = MAX_IDS,
    ):
        self.windows = [split.make_windows(layout) for split in splits]
        self.batch, self.byte_lengths, self.vocab_size = batch, byte_lengths, vocab_size
        self.names = ", ".join(split.tokens.name for split in splits)
        self._ends = np.cumsum([windows.covering for windows in self.windows])
        total = -(-int(self._ends[-1]) // batch)
        if not total:
            raise UsageError(f"{self.names}: the split needs at least 2 tokens to predict one; take a longer text")
        self.count = min(limit, total) if limit else total
        self._numbers = [number * total // self.count for number in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def gather(self, rows: Rows = EVERY_ROW) -> Iterator[Batch]:
        """Yields the batches; `rows` are those of each global batch to gather."""
        return (self._gather_rows(np.arange(n * self.batch, (n + 1) * self.batch)[rows]) for n in self._numbers)

    def _gather_rows(self, indices: np.ndarray) -> Batch:
        sources = np.minimum(np.searchsorted(self._ends, indices, side="right"), len(self.windows) - 1)
        starts = self._ends - [windows.covering for windows in self.windows]

        def gather(source: int, selected: np.ndarray) -> Batch:
            return self.windows[source].gather(indices[selected] - starts[source])

        batch = _join_sources(sources, gather)
        check_ids(batch, self.vocab_size, self.names)
        if self.byte_lengths is not None and "weights" in batch:
            batch["bytes"] = self.byte_lengths[batch["targets"]] * batch["weights"]
        return batch


def _join_sources(sources: np.ndarray, gather: Callable[[int, np.ndarray], Batch]) -> Batch:
    """Returns a batch whose rows are of these sources; gather(source, rows) makes those rows of it."""
    batch: Batch = {}
    for source in np.unique(sources):
        selected = np.flatnonzero(sources == source)
        for name, values in gather(source, selected).items():
            batch.setdefault(name, np.zeros((len(sources), *values.shape[1:]), values.dtype))[selected] = values
    return batch


def check_ids(batch: Batch, vocab_size: int, location: str) -> Batch:
    """Returns the batch. Raises RunError for an id beyond the vocabulary, which a device would clip in silence."""
    for ids in (batch["tokens"], batch["targets"][..., -1]):  # the other targets are tokens as well
        for wrong in (ids.min(), ids.max()):
            if not 0 <= wrong < vocab_size:
                raise RunError(f"{location}: id {wrong} is not in the vocabulary of {vocab_size}; the data is damaged")
    return batch


def _check_length(split: AnySplit, windows: Windows, layout: RowLayout) -> None:
    if windows.count:
        return
    tokens = len(split.tokens)
    shorter = f"seq={tokens - 1} at most" if tokens > 1 else "more than one token"
    raise UsageError(
        f"the train split of {split.tokens.name} has {tokens} tokens, and a window of seq={layout.seq} needs "
        f"{layout.seq + 1}; take a longer text or {shorter}"
    )
