"""Token ids to batches: random windows for training, a fixed covering for evaluation.

Every batch is a function of its number, for any number of processes; each process gathers only its own rows.
"""

from collections.abc import Iterator

import numpy as np

from shardformer.data.tensorflow import import_tensorflow
from shardformer.errors import UsageError

PREFETCH = 4  # batches ready ahead of the device

Batch = dict[str, np.ndarray]
EVERY_ROW = slice(None)


def train_batches(
    tokens: np.ndarray, *, seq: int, batch: int, seed: int, first_step: int = 0, rows=EVERY_ROW
) -> Iterator[Batch]:
    """Random windows without end: int32 `tokens` and `targets` of [rows, seq], from step `first_step` on.

    `rows`, here and below, are the rows of the global batch to gather: a slice or an array of their numbers.
    """
    if len(tokens) < seq + 1:
        raise UsageError(
            f"the train split has {len(tokens)} tokens, and a window of seq={seq} needs {seq + 1}; "
            f"take a longer text or {_shorter(seq, len(tokens))}"
        )
    tf = import_tensorflow()
    text = tf.constant(_compact(tokens))
    held = np.arange(batch)[rows]
    within = tf.range(seq + 1, dtype=tf.int64)
    last_start = len(tokens) - seq - 1

    def windows(step):
        # Drawn for the whole batch, so that a row does not depend on how many processes share it.
        starts = tf.random.stateless_uniform(
            [batch], seed=[seed, step], minval=0, maxval=last_start + 1, dtype=tf.int64, alg="philox"
        )
        window = tf.cast(tf.gather(text, tf.gather(starts, held)[:, None] + within), tf.int32)
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    return tf.data.Dataset.counter(start=first_step).map(windows).prefetch(PREFETCH).as_numpy_iterator()


def eval_batches(tokens: np.ndarray, *, seq: int, batch: int, limit: int = 0, rows=EVERY_ROW) -> Iterator[Batch]:
    """Windows side by side: every token but the first is a target exactly once.

    `weights` is 1 where there is one and 0 in the padding. `limit` > 0 takes so many batches, spread over the split.
    """
    total = _covering(tokens, seq, batch)
    count = eval_batch_count(tokens, seq=seq, batch=batch, limit=limit)
    numbers = [number * total // count for number in range(count)]
    last = len(tokens) - 1

    def covering(number: int) -> Batch:
        starts = seq * np.arange(number * batch, (number + 1) * batch)[rows, None]
        positions = starts + np.arange(seq)
        return {
            "tokens": tokens[np.minimum(positions, last)].astype(np.int32),
            "targets": tokens[np.minimum(positions + 1, last)].astype(np.int32),
            "weights": (positions < last).astype(np.float32),
        }

    return map(covering, numbers)


def eval_batch_count(tokens: np.ndarray, *, seq: int, batch: int, limit: int = 0) -> int:
    """How many batches `eval_batches` yields."""
    total = _covering(tokens, seq, batch)
    return min(limit, total) if limit else total


def _covering(tokens: np.ndarray, seq: int, batch: int) -> int:
    if len(tokens) < 2:
        raise UsageError(f"a split of {len(tokens)} tokens has nothing to predict: it needs 2; take a longer text")
    windows = -(-(len(tokens) - 1) // seq)
    return -(-windows // batch)


def _compact(tokens: np.ndarray) -> np.ndarray:
    """The same ids in the narrowest type that holds them: it stays in memory, and windows are cut from it."""
    return tokens.astype(np.min_scalar_type(int(tokens.max())))


def _shorter(seq: int, tokens: int) -> str:
    return f"seq={tokens - 1} at most" if tokens > 1 else "more than one character"
