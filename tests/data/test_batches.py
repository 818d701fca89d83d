"""Batches are functions of their number, windows of the text, and cover what they should."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.data import eval_batch_count, eval_batches, train_batches
from shardformer.errors import UsageError

TEXT = np.random.default_rng(0).integers(0, 65, 1000).astype(np.int32)
SIZES = {"seq": 16, "batch": 6}


def _train(count, tokens=TEXT, **options):
    return list(itertools.islice(train_batches(tokens, **{**SIZES, "seed": 3, **options}), count))


def _equal(first, second):
    assert len(first) == len(second)
    return all(np.array_equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in (*a, *b))


def test_train_shapes_and_types():
    (batch,) = _train(1)
    for key in ("tokens", "targets"):
        assert batch[key].shape == (6, 16)
        assert batch[key].dtype == np.int32


def test_targets_are_the_next_tokens_of_one_window():
    positions = np.arange(100_000, dtype=np.int32)  # each token tells where it stands
    for batch in _train(5, positions):
        assert np.array_equal(batch["targets"], batch["tokens"] + 1)
        assert np.array_equal(np.diff(batch["tokens"]), np.ones((6, 15)))


def test_batch_is_a_function_of_seed_and_step():
    assert _equal(_train(5), _train(5))
    assert not _equal(_train(5), _train(5, seed=4))
    first, second = _train(2)
    assert not _equal([first], [second])


def test_the_golden_batch():
    """A run resumed under another TensorFlow reads on where it stopped."""
    (batch,) = _train(1, np.arange(100_000, dtype=np.int32), seed=0, first_step=7)
    assert batch["tokens"][:, 0].tolist() == [56685, 42145, 94984, 93839, 37344, 3540]


def test_resuming_equals_skipping():
    assert _equal(_train(3, first_step=4), _train(7)[4:])
    assert not _equal(_train(3, first_step=4), _train(7)[3:6])


@pytest.mark.parametrize("rows", [(slice(0, 3), slice(3, 6)), (np.array([0, 2, 4]), np.array([1, 3, 5]))])
def test_processes_share_one_global_batch(rows):
    halves = [_train(4, rows=half) for half in rows]
    order = np.argsort(np.concatenate([np.arange(6)[half] for half in rows]))
    joined = [{key: np.concatenate([a[key], b[key]])[order] for key in a} for a, b in zip(*halves, strict=True)]
    assert _equal(joined, _train(4))
    assert not _equal(*halves)


def test_first_and_last_window_occur():
    starts = {start for batch in _train(60, np.arange(20, dtype=np.int32)) for start in batch["tokens"][:, 0].tolist()}
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize("largest", [255, 256, 65535, 65536, 0x10FFFF])
def test_ids_of_every_width_survive(largest):
    tokens = np.full(20, largest, np.int32)
    assert _train(1, tokens)[0]["tokens"].min() == largest


def test_one_window_is_enough_and_less_is_an_error():
    assert np.array_equal(_train(1, TEXT[:17])[0]["targets"][0], TEXT[1:17])
    with pytest.raises(UsageError, match=r"16 tokens.*seq=16 needs 17.*seq=15"):
        train_batches(TEXT[:16], **SIZES, seed=0)


@settings(deadline=None)  # a busy machine is not a failure
@given(n=st.integers(2, 300), seq=st.integers(1, 40), batch=st.integers(1, 7))
def test_every_target_is_covered_once(n, seq, batch):
    positions = np.arange(n)
    covered = []
    for got in eval_batches(positions, seq=seq, batch=batch):
        assert got["tokens"].shape == got["targets"].shape == got["weights"].shape == (batch, seq)
        real = got["weights"] == 1
        assert np.all(real | (got["weights"] == 0))
        assert np.array_equal(got["tokens"][real] + 1, got["targets"][real])
        covered += got["targets"][real].tolist()
    assert covered == list(range(1, n))


@settings(deadline=None)  # a busy machine is not a failure
@given(n=st.integers(2, 300), seq=st.integers(1, 40), half=st.integers(1, 4), limit=st.integers(0, 5))
def test_evaluation_is_shared_too(n, seq, half, limit):
    options = {"seq": seq, "batch": 2 * half, "limit": limit}
    halves = [list(eval_batches(np.arange(n), rows=rows, **options)) for rows in (slice(0, half), slice(half, None))]
    joined = [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)]
    assert _equal(joined, list(eval_batches(np.arange(n), **options)))


def test_limit_spreads_over_the_split():
    whole = list(eval_batches(np.arange(1001), seq=10, batch=5))
    some = list(eval_batches(np.arange(1001), seq=10, batch=5, limit=4))
    assert len(whole) == eval_batch_count(np.arange(1001), seq=10, batch=5) == 20
    assert len(some) == eval_batch_count(np.arange(1001), seq=10, batch=5, limit=4) == 4
    assert _equal(some, whole[::5])
    assert _equal(list(eval_batches(np.arange(1001), seq=10, batch=5, limit=99)), whole)


def test_nothing_to_predict():
    with pytest.raises(UsageError, match="1 tokens"):
        eval_batches(TEXT[:1], seq=4, batch=2)
    with pytest.raises(UsageError, match="0 tokens"):
        eval_batch_count(TEXT[:0], seq=4, batch=2)
