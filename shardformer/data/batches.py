"""Windows to batches: every batch is a function of (seed, step), and each process gathers only its own rows."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from shardformer.data.order import Mixture, epoch_order, epoch_shift, random_draws, scramble
from shardformer.data.tensorflow import import_tensorflow
from shardformer.data.tokens import Split
from shardformer.data.vocabulary import MAX_IDS
from shardformer.data.windows import Batch, PackedWindows, RowLayout, Windows
from shardformer.errors import RunError, UsageError

PREFETCH = 4  # batches ready ahead of the device
EVERY_ROW = slice(None)


class TrainBatches:
    """The batch of any step. `splits` are mixed by `weights`; `order` is epoch, random or file (see Config.windows)."""

    def __init__(
        self, splits: list[Split], weights: list[float], layout: RowLayout, *, batch: int, seed: int, order="epoch"
    ):
        self.windows = [Windows.make(split, layout) for split in splits]
        self.layout, self.batch, self.seed, self.order = layout, batch, seed, order
        self._mixture = Mixture(weights, seed) if len(splits) > 1 else None
        for split, windows in zip(splits, self.windows, strict=True):
            _check_length(split, windows, layout)
            if order == "file" and self._mixture:
                raise UsageError("windows=file reads one source in its order; with several in data= give windows=epoch")

    def __call__(self, step: int, rows=EVERY_ROW) -> Batch:
        """int32 `tokens` and `targets` of [rows, seq]; `rows` are those of the global batch to gather."""
        positions = step * self.batch + np.arange(self.batch, dtype=np.int64)[rows]
        if not self._mixture:
            return self._gather(0, positions, step, rows)
        sources, positions = self._mixture.locate(positions)
        return _join_sources(sources, lambda source, held: self._gather(source, positions[held], step, rows))

    def _gather(self, source: int, positions: np.ndarray, step: int, rows) -> Batch:
        windows = self.windows[source]
        # Each source of a mixture has an order of its own; alone it has the seed's.
        seed = int(scramble(self.seed, source)[0] >> np.uint64(1)) if self._mixture else self.seed
        if self.order == "random" and isinstance(windows, PackedWindows):
            numbers, shifts = 0, random_draws(positions, windows.starts, seed)
        elif self.order == "random":
            numbers, shifts = random_draws(positions, windows.count, seed), 0
        elif self.order == "file":
            numbers, shifts = windows.rows_in_file_order(step, self.batch)[rows], 0
        else:
            epochs, numbers = epoch_order(positions, windows.count, seed)
            shifts = epoch_shift(epochs, windows.slack, seed)
        return windows.gather(numbers, shifts, weighted=self.layout.weighs_targets)


def stream(make: Callable[[int], Batch], first_step: int, through_tf: bool) -> Iterator[Batch]:
    """The batches from a step on, without end, made ahead of time: by tf.data, or by a thread.

    tf.data carries texts and TFRecords. Token files are memory-mapped and take a thread: twice the tokens per
    CPU-second of tf.data around the same function, and TensorFlow is not imported.
    """
    return _TfDataBatches(make, first_step) if through_tf else _ThreadedBatches(make, first_step)


class _TfDataBatches:
    """An iterator over a tf.data.Dataset, closed before the interpreter ends: TensorFlow would wait forever."""

    def __init__(self, make: Callable[[int], Batch], first_step: int):
        tf = import_tensorflow()
        first = make(first_step)
        names, types = tuple(first), [tf.as_dtype(values.dtype) for values in first.values()]
        failures = self._failures = []

        def gather(step) -> list[np.ndarray]:
            try:
                batch = make(int(step))
            except Exception as error:  # TensorFlow would make one of its own of it, with all of its stack in it
                failures.append(error)
                raise
            return [batch[name] for name in names]

        def build(step):
            arrays = tf.numpy_function(gather, [step], types)
            for array, name in zip(arrays, names, strict=True):
                array.set_shape(first[name].shape)
            return dict(zip(names, arrays, strict=True))

        dataset = tf.data.Dataset.counter(start=first_step).map(build).prefetch(PREFETCH)
        self._held = [dataset.as_numpy_iterator()]
        weakref.finalize(self, self._held.clear)

    def close(self) -> None:
        """Left to the garbage collector, it could be closed within its own thread, which would wait for itself."""
        self._held.clear()

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._held[0])
        except Exception:
            if self._failures:
                raise self._failures[0] from None
            raise


class _ThreadedBatches:
    """An iterator whose thread stays PREFETCH batches ahead and ends with it."""

    def __init__(self, make: Callable[[int], Batch], first_step: int):
        self._ready: queue.Queue = queue.Queue(PREFETCH)
        self._ended = threading.Event()
        threading.Thread(target=_fill, args=(make, first_step, self._ready, self._ended), daemon=True).start()

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._ended.set()

    __del__ = close


def _fill(make, step: int, ready: queue.Queue, ended: threading.Event) -> None:
    """Knows the queue alone, not the iterator: so that the iterator can be collected, which ends this."""
    while not ended.is_set():
        try:
            batch = make(step)
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
    """A split from end to end: every target once, with weight 1 where there is one and 0 in the padding.

    `limit` > 0 takes so many batches, spread over the split. `byte_lengths` are those of the vocabulary's ids.
    """

    def __init__(
        self,
        splits: list[Split],
        layout: RowLayout,
        *,
        batch: int,
        limit: int = 0,
        byte_lengths=None,
        vocab_size: int = MAX_IDS,
    ):
        self.windows = [Windows.make(split, layout) for split in splits]
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

    def gather(self, rows=EVERY_ROW) -> Iterator[Batch]:
        """The batches; `rows` are those of each to gather."""
        return (self._gather_rows(np.arange(n * self.batch, (n + 1) * self.batch)[rows]) for n in self._numbers)

    def _gather_rows(self, numbers: np.ndarray) -> Batch:
        sources = np.minimum(np.searchsorted(self._ends, numbers, side="right"), len(self.windows) - 1)
        starts = self._ends - [windows.covering for windows in self.windows]
        gather = lambda source, held: self.windows[source].gather(numbers[held] - starts[source])
        batch = _join_sources(sources, gather)
        check_ids(batch, self.vocab_size, self.names)
        if self.byte_lengths is not None:
            batch["bytes"] = self.byte_lengths[batch["targets"]] * batch["weights"]
        return batch


def _join_sources(sources: np.ndarray, gather: Callable[[int, np.ndarray], Batch]) -> Batch:
    """A batch whose rows are of these sources; gather(source, rows) makes those rows of it."""
    batch: Batch = {}
    for source in np.unique(sources):
        held = np.flatnonzero(sources == source)
        for name, values in gather(source, held).items():
            batch.setdefault(name, np.zeros((len(sources), *values.shape[1:]), values.dtype))[held] = values
    return batch


def check_ids(batch: Batch, vocab_size: int, place: str) -> Batch:
    """The same batch, if its ids are in the vocabulary: on the device, one that is not would go unnoticed."""
    for ids in (batch["tokens"], batch["targets"][:, -1]):  # the other targets are tokens as well
        for wrong in (ids.min(), ids.max()):
            if not 0 <= wrong < vocab_size:
                raise RunError(f"{place}: id {wrong} is not in the vocabulary of {vocab_size}; the data is damaged")
    return batch


def _check_length(split: Split, windows: Windows, layout: RowLayout) -> None:
    if windows.count:
        return
    tokens = len(split.tokens)
    shorter = f"seq={tokens - 1} at most" if tokens > 1 else "more than one token"
    raise UsageError(
        f"the train split of {split.tokens.name} has {tokens} tokens, and a window of seq={layout.seq} needs "
        f"{layout.seq + 1}; take a longer text or {shorter}"
    )
