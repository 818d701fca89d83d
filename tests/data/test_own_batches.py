"""Batches of the caller: every id is checked, and a target of -100 has weight 0."""

import re

import numpy as np
import pytest

from shardformer import OwnBatches, UsageError
from tests import shared

VOCAB, SHAPE = 11, (2, 4)
CONFIG = shared.tiny(vocab=VOCAB, batch=2, seq=4, mesh="1x1")


def make_batch(**arrays) -> dict[str, np.ndarray]:
    ids = np.arange(8).reshape(SHAPE)
    return {"tokens": ids, "targets": ids + 1} | arrays


def changed(name: str, value) -> dict[str, np.ndarray]:
    """Returns a batch with another value at [1, 2]."""
    batch = make_batch()
    batch[name][1, 2] = value
    return batch


def read(batch) -> dict[str, np.ndarray]:
    return next(OwnBatches(lambda first: iter([batch]), VOCAB).train_batches(CONFIG))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed("targets", 10**6), "step 0: targets[1, 2] is 1000000, expected an id from 0 to 10, or -100 for a"),
        (changed("targets", -1), "targets[1, 2] is -1, expected an id from 0 to 10, or -100"),
        (changed("tokens", VOCAB), "tokens[1, 2] is 11, expected an id from 0 to 10; give the ids of the vocabulary"),
        (changed("tokens", -100), "tokens[1, 2] is -100, expected an id from 0 to 10; give"),
        (make_batch(targets=np.full(SHAPE, 2.7)), "targets has the type float64, expected integers; give np.int32"),
        (make_batch(tokens=np.ones(SHAPE, bool)), "tokens has the type bool, expected integers"),
        *(
            (
                make_batch(weights=np.full(SHAPE, value)),
                f"weights[0, 0] is {value}, expected a finite number of at least 0",
            )
            for value in (np.nan, np.inf, -1.0, 1e39)
        ),
        (make_batch(weights=np.full(SHAPE, "a")), "weights has the type <U1, expected numbers; give np.float32"),
        (make_batch(weights=np.ones(4)), "weights has the shape (4,), expected (batch, seq) = (2, 4)"),
        (make_batch(weight=np.ones(SHAPE)), "a batch has tokens, targets, weights, documents, got 'weight'; leave it"),
    ],
)
def test_wrong_array_of_a_batch_is_rejected(batch, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read(batch)


@pytest.mark.parametrize("type_", [np.int32, np.int64, np.uint8])
def test_every_integer_type_is_read_as_int32(type_):
    batch = read({name: ids.astype(type_) for name, ids in make_batch().items()})
    assert {name: ids.dtype for name, ids in batch.items()} == {"tokens": np.int32, "targets": np.int32}


def test_ignored_target_has_weight_zero():
    batch = read(changed("targets", -100))
    assert batch["weights"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 1]]
    assert batch["targets"][1, 2] == 0
    assert batch["weights"].dtype == np.float32


def test_ignored_target_keeps_the_other_weights():
    batch = read(changed("targets", -100) | {"weights": np.full(SHAPE, 0.5)})
    assert batch["weights"].tolist() == [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0, 0.5]]


def test_ignored_target_of_a_validation_batch_counts_not():
    own = OwnBatches(lambda first: iter(()), VOCAB, validation=[changed("targets", -100)])
    [batch] = own.eval_batches("validation", CONFIG).gather()
    assert batch["weights"].sum() == 7


def test_arrays_of_checked_batches_are_known():
    """Batches of tokens may have weights; the arrays of a task are checked."""
    batches = OwnBatches(lambda first: iter([]), VOCAB)
    assert not batches.has_known_arrays(CONFIG)
    assert batches.with_check(lambda batch: batch).has_known_arrays(CONFIG)


def test_pairs_cannot_be_learned_from_own_batches():
    with pytest.raises(UsageError, match="objective=orpo learns from preference pairs, and data=own batches has none"):
        OwnBatches(lambda first: iter([]), VOCAB).separate_documents(shared.tiny(objective="orpo"))


def test_validation_may_be_a_generator():
    batches = OwnBatches(lambda first: iter(()), VOCAB, validation=(make_batch() for _ in range(2)))
    assert [len(list(batches.eval_batches("validation", CONFIG).gather())) for _ in range(2)] == [2, 2]
    assert batches.held_out == ("validation",)
