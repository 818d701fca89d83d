"""Batches are functions of (seed, step), cover what they should, and are shared out among processes."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.data.batches import EvalBatches, TrainBatches, check_ids, stream
from shardformer.data.order import epoch_shift
from shardformer.data.tokens import Tokens
from shardformer.data.windows import RowLayout, Split
from shardformer.errors import RunError, UsageError
from tests.launch import SECONDS

POSITIONS = np.arange(1001)  # each token is its position
SEQ, BATCH = 16, 6


def train(ids=POSITIONS, *, seed=3, order="epoch", batch=BATCH, weights=(1.0,), **cut):
    splits = ids if isinstance(ids, list) else [Split.of_ids(ids)]
    return TrainBatches(splits, weights, RowLayout(**{"seq": SEQ} | cut), batch=batch, seed=seed, order=order)


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def starts(batches, steps):
    return np.concatenate([batches(step)["tokens"][:, 0] for step in steps])


@pytest.mark.parametrize("order", ["epoch", "random", "file"])
def test_rows_are_windows_of_the_text(order):
    batch = train(order=order)(5)
    for name in ("tokens", "targets"):
        assert batch[name].shape == (BATCH, SEQ)
        assert batch[name].dtype == np.int32
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    assert np.array_equal(np.diff(batch["tokens"]), np.ones((BATCH, SEQ - 1)))
    assert batch.keys() == {"tokens", "targets"}


def test_stored_order_begins_again_after_the_last_row():
    found = starts(train(order="file"), range(25))  # 150 rows of 62
    assert found.tolist() == [SEQ * (row % 62) for row in range(25 * BATCH)]


def test_a_process_gathers_its_rows_of_the_stored_order():
    batches = train(order="file")
    assert np.array_equal(batches(3, slice(2, 4))["tokens"], batches(3)["tokens"][2:4])


def test_each_epoch_begins_at_its_own_offset():
    rows = starts(train(batch=2), range(31 * 6)).reshape(6, 62)
    assert rows.min(axis=1).tolist() == epoch_shift(np.arange(6), 8, seed=3).tolist()
    assert len(set(rows.min(axis=1).tolist())) > 2


def test_sources_of_a_mixture_have_orders_of_their_own():
    splits = [Split.of_ids(np.arange(641)), Split.of_ids(np.arange(1000, 1641))]
    found = starts(train(splits, weights=(1.0, 1.0), batch=8), range(10))
    first, second = (found[found // 1000 == source] % 1000 for source in (0, 1))
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()


def test_a_seed_chooses_when_each_source_is_read():
    splits = [Split.of_ids(np.arange(641)), Split.of_ids(np.arange(1000, 1641))]
    orders = {tuple(starts(train(splits, weights=(1.0, 1.0), seed=seed), range(10)) // 1000) for seed in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("cut", "weighted"),
    [({}, False), ({"pack": False}, True), ({"mask_documents": True}, True), ({"mask_prompt": True}, True)],
)
def test_training_rows_have_weights_if_targets_differ(cut, weighted):
    split = Split(Tokens([np.arange(200)], "text"), np.array([100, 200]), prompts=np.array([50, 10]))
    batches = train([split], **cut)
    assert ("weights" in batches(0)) == weighted
    if cut.get("mask_prompt"):
        steps = [batches(step) for step in range(2)]
        prompts = {*range(50), *range(100, 110)}
        for batch in steps:
            assert np.array_equal(batch["weights"] == 0, np.isin(batch["targets"], list(prompts)))


@pytest.mark.parametrize("order", ["epoch", "random"])
def test_a_batch_is_a_function_of_seed_and_step(order):
    first, again, other = train(order=order), train(order=order), train(order=order, seed=4)
    assert all(equal(first(step), again(step)) for step in (7, 0, 10**6))
    assert not equal(first(0), other(0))
    assert not equal(first(0), first(1))


def test_every_window_once_an_epoch_over_epochs():
    batches = train(batch=4)  # 62 windows of 16, and 8 tokens of slack
    rows = starts(batches, range(31)).reshape(2, 62)
    for epoch in rows:
        assert np.array_equal(np.diff(np.sort(epoch)), np.full(61, SEQ))
        assert 0 <= epoch.min() <= 1000 - 62 * SEQ
    assert rows[0].tolist() != rows[1].tolist()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_global_batch(processes):
    batches = train(batch=8)
    for step in (0, 3, 10**6):
        parts = [batches(step, slice(8 // processes * p, 8 // processes * (p + 1))) for p in range(processes)]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        assert equal(joined, batches(step))
    interleaved = batches(3, np.array([1, 4, 6]))
    assert np.array_equal(interleaved["tokens"], batches(3)["tokens"][[1, 4, 6]])


def test_step_a_million_costs_no_more():
    batches = train(np.arange(100_000))
    began = time.thread_time()
    batches(10**6)
    assert time.thread_time() - began < 0.5


def test_random_rows_begin_anywhere_and_file_rows_in_order():
    assert set(starts(train(np.arange(20), order="random"), range(60)).tolist()) == {0, 1, 2, 3}
    assert starts(train(order="file"), range(3)).tolist() == [SEQ * n for n in range(3 * BATCH)]


def test_a_mixture_takes_its_shares_and_each_source_completely():
    splits = [Split.of_ids(np.arange(16 * 30 + 1)), Split.of_ids(np.arange(10_000, 10_000 + 16 * 10 + 1))]
    batches = train(splits, weights=(3.0, 1.0), batch=4)
    found = starts(batches, range(10))
    assert sorted(found[found < 10_000].tolist()) == [SEQ * n for n in range(30)]
    assert sorted(found[found >= 10_000].tolist()) == [10_000 + SEQ * n for n in range(10)]
    halves = [batches(7, rows) for rows in (slice(0, 2), slice(2, 4))]
    assert equal({key: np.concatenate([half[key] for half in halves]) for key in halves[0]}, batches(7))
    with pytest.raises(UsageError, match="order=file reads one source"):
        train(splits, weights=(3.0, 1.0), order="file")


@pytest.mark.parametrize("through_tf", [True, False])
def test_streams_carry_the_same_batches_from_any_step(through_tf):
    batches = train(mask_documents=True)
    for first in (0, 5):
        carried = list(itertools.islice(stream(batches, first, through_tf), 7))
        assert all(equal(batch, batches(first + place)) for place, batch in enumerate(carried))


@pytest.mark.parametrize("through_tf", [True, False])
def test_failure_of_prefetch_is_raised_at_its_batch(through_tf):
    batches = train()
    sizes = {3: 5}  # vocabulary sizes, from a step whose batch is prepared ahead of time
    carried = stream(lambda n: check_ids(batches(n), sizes.get(n, 1001), f"mine.bin, step {n}"), 0, through_tf)
    assert len(list(itertools.islice(carried, 3))) == 3
    with pytest.raises(RunError, match=r"mine\.bin, step 3: id \d+ is not in the vocabulary of 5; the data is damaged"):
        next(carried)


@pytest.mark.parametrize("wrong", [-1, 500])
def test_an_id_outside_the_vocabulary_is_named(wrong):
    ids = np.array([*range(100), wrong], np.int64)
    with pytest.raises(RunError, match=f"a: id {wrong} is not in the vocabulary of 500; the data is damaged"):
        check_ids(train([Split(Tokens([ids[-17:]], "a"))], batch=1)(0), 500, "a")
    evaluated = EvalBatches([Split(Tokens([ids], "b"))], RowLayout(SEQ), batch=2, vocab_size=500)
    with pytest.raises(RunError, match=f"b: id {wrong} is not in the vocabulary of 500; the data is damaged"):
        list(evaluated.gather())


@pytest.mark.parametrize("largest", [255, 256, 65535, 65536, 0x10FFFF])
def test_ids_of_every_width_survive(largest):
    assert train(np.full(20, largest))(0)["tokens"].min() == largest


def test_one_window_is_enough_and_less_is_an_error():
    assert np.array_equal(train(POSITIONS[:17])(0)["targets"][0], POSITIONS[1:17])
    with pytest.raises(UsageError, match=r"16 tokens.*seq=16 needs 17.*seq=15"):
        train(POSITIONS[:16])


def test_tokens_of_several_files_are_one_sequence():
    parts = np.split(POSITIONS, [3, 3, 500, 501])
    split = Split(Tokens(parts, "parts"))
    assert len(split.tokens) == 1001
    whole, joined = train(), train([split])
    assert all(equal(whole(step), joined(step)) for step in range(20))
    cut = split.tokens.cut(2, 502)
    assert cut.take(0, 500).tolist() == list(range(2, 502))


@settings(deadline=None)  # a busy machine is not a failure
@given(n=st.integers(2, 300), seq=st.integers(1, 40), batch=st.integers(1, 7), cuts=st.lists(st.integers(1, 299)))
def test_every_target_is_evaluated_once(n, seq, batch, cuts):
    ends = np.array(sorted({*[c for c in cuts if c < n], n}))
    for pack in (True, False):
        split = Split(Tokens([np.arange(n)], "text"), ends)
        covered = []
        for got in EvalBatches([split], RowLayout(seq, pack), batch=batch).gather() if n > len(ends) or pack else ():
            assert got["tokens"].shape == got["targets"].shape == got["weights"].shape == (batch, seq)
            real = got["weights"] == 1
            assert np.all(real | (got["weights"] == 0))
            assert np.array_equal(got["tokens"][real] + 1, got["targets"][real])
            covered += got["targets"][real].tolist()
        firsts = {0} if pack else {0, *ends.tolist()}  # a document's first token is no target
        assert covered == [target for target in range(n) if target not in firsts]


def test_evaluation_is_shared_and_spread():
    options = {"batch": 6, "byte_lengths": 1 + np.arange(1001) % 3}  # 1 for id 0, which pads rows
    splits = [Split.of_ids(POSITIONS), Split.of_ids(POSITIONS[:100])]
    whole = list(EvalBatches(splits, RowLayout(SEQ), **options).gather())
    halves = [list(EvalBatches(splits, RowLayout(SEQ), **options).gather(rows)) for rows in (slice(0, 3), slice(3, 6))]
    joined = [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)]
    assert all(map(equal, joined, whole))
    assert sum(batch["weights"].sum() for batch in whole) == 1000 + 99
    assert sum(batch["bytes"].sum() for batch in whole) == sum(1 + p % 3 for p in [*range(1, 1001), *range(1, 100)])
    some = EvalBatches(splits, RowLayout(SEQ), limit=4, **options)
    assert len(some) == 4
    assert len(whole) == 12
    assert all(map(equal, some.gather(), whole[::3]))
    assert len(EvalBatches(splits, RowLayout(SEQ), limit=100, **options)) == 12


def test_nothing_to_predict():
    with pytest.raises(UsageError, match="the split needs at least 2 tokens"):
        EvalBatches([Split.of_ids(POSITIONS[:1])], RowLayout(4), batch=2)


@pytest.mark.multiprocess
def test_a_program_ends_while_batches_are_made():
    """TensorFlow's threads wait for Python, and Python's exit waits for them; a closed iterator has no threads.

    TensorFlow, whose import lasts seconds, is quiet and uses no accelerators.
    """
    program = (
        "import numpy as np\n"
        "from shardformer.data.batches import TrainBatches, stream\n"
        "from shardformer.data.windows import Split\n"
        "from shardformer.data.windows import RowLayout\n"
        "make = TrainBatches([Split.of_ids(np.arange(100))], [1.0], RowLayout(4), batch=2, seed=0)\n"
        "kept = [stream(make, 0, through_tf) for through_tf in (True, False)]\n"
        "print([next(batches)['tokens'].shape for batches in kept])\n"
        "import sys, tensorflow as tf\n"
        "print(tf.reduce_sum(tf.range(5)).numpy(), tf.config.get_visible_devices('GPU'))\n"
        "print('heard', file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("TF_CPP_MIN_LOG_LEVEL", "PYTHONWARNINGS"):  # TensorFlow uses deprecated parts of Python
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert (done.stdout, done.stderr) == ("[(2, 4), (2, 4)]\n10 []\n", "heard\n")
