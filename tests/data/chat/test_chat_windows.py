"""Conversations in rows: whole or cut behind a turn, packed by best fit, with the loss on what assistants write."""

import numpy as np
import pytest

from shardformer.data.chat.chat_windows import ChatSplit, ChatWindows, describe_rows, pack_best_fit
from shardformer.data.tokens import Tokens
from shardformer.data.windows import RowLayout
from shardformer.errors import UsageError

# Conversations as masks: 1 is a token of an assistant.
TWO_TURNS = [0, 0, 1, 1, 0, 1, 1]
ONE_TURN = [0, 1, 1]
NO_TURN = [0, 0, 0]
LONG_TURN = [0, *[1] * 20]


def make_split(*masks) -> ChatSplit:
    """Returns a split whose ids count from 1."""
    learned = np.concatenate([np.array(mask, np.uint8) for mask in masks])
    ids = np.arange(1, len(learned) + 1, dtype=np.uint16)
    return ChatSplit(Tokens([ids], "TEST"), np.cumsum([len(mask) for mask in masks]), Tokens([learned], "TEST"))


def make_windows(*masks, seq: int = 7, **layout) -> ChatWindows:
    return make_split(*masks).make_windows(RowLayout(seq, **{"mask_documents": True} | layout))


def test_rows_hold_whole_conversations():
    windows = make_windows(TWO_TURNS, ONE_TURN, ONE_TURN, seq=9)
    batch = windows.gather(np.arange(2))
    assert windows.count == 2
    np.testing.assert_array_equal(batch["tokens"][0], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(batch["targets"][0], [2, 3, 4, 5, 6, 7, 8, 9, 10])
    np.testing.assert_array_equal(batch["documents"][0], [0] * 7 + [1] * 2)
    np.testing.assert_array_equal(batch["weights"][0], [0, 1, 1, 0, 1, 1, 0, 1, 1])
    np.testing.assert_array_equal(batch["tokens"][1], [11, 12, 13, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch["weights"][1], [1, 1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch["documents"][1], [0, 0, 0, 1, 1, 1, 1, 1, 1])


def test_each_learned_token_is_a_target_once():
    draw = np.random.RandomState(0)
    masks = [[0, *draw.randint(0, 2, draw.randint(1, 30)), 1] for _ in range(200)]
    split = make_split(*masks)
    windows = split.make_windows(RowLayout(33, mask_documents=True))
    batch = windows.gather(np.arange(windows.count))
    learned = split.tokens.take(0, len(split.tokens))[split.learned.take(0, len(split.tokens)) == 1]
    np.testing.assert_array_equal(np.sort(batch["targets"][batch["weights"] == 1]), learned)


def test_no_first_token_is_a_target():
    batch = make_windows([1, 1, 1], [1, 1, 1], seq=5).gather(np.arange(1))
    np.testing.assert_array_equal(batch["weights"][0], [1, 1, 0, 1, 1])


def test_a_long_conversation_is_left_out_and_counted():
    windows = make_windows(LONG_TURN, ONE_TURN, NO_TURN)
    assert (windows.count, windows.fit.too_long, windows.fit.without_loss, windows.fit.cut) == (1, 1, 1, 0)
    said = describe_rows("chat", windows)
    assert "1 of 3 conversations" in said
    assert "1 left out: the first turn does not fit in seq=7" in said
    assert "1 left out: no assistant" in said


def test_a_long_conversation_is_cut_behind_a_turn():
    windows = make_windows(TWO_TURNS, LONG_TURN, seq=5)
    assert (windows.fit.cut, windows.fit.too_long) == (1, 1)
    batch = windows.gather(np.arange(1))
    np.testing.assert_array_equal(batch["tokens"], [[1, 2, 3, 4, 0]])
    np.testing.assert_array_equal(batch["weights"], [[0, 1, 1, 0, 0]])
    assert "1 cut behind the last turn" in describe_rows("chat", windows)


def test_without_packing_a_row_has_one_conversation():
    windows = make_windows(ONE_TURN, ONE_TURN, pack=False, mask_documents=False)
    assert windows.count == 2
    assert windows.gather(np.arange(2))["tokens"][:, :3].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_packed_rows_need_masked_documents():
    with pytest.raises(UsageError, match="documents=masked"):
        make_windows(ONE_TURN, mask_documents=False)


def test_a_split_without_a_row_is_rejected():
    with pytest.raises(UsageError, match=r"0 of 1 conversations.*larger seq"):
        make_windows(LONG_TURN)


def test_rows_beyond_the_last_have_no_weight():
    assert not make_windows(ONE_TURN).gather(np.array([0, 1]))["weights"][1].any()


@pytest.mark.parametrize("seed", range(3))
def test_packing_loses_nothing_and_fills_rows(seed):
    lengths = np.random.RandomState(seed).randint(1, 101, 2000)
    rows = pack_best_fit(lengths, 100)
    assert sorted(n for row in rows for n in row) == list(range(2000))
    sums = [int(lengths[row].sum()) for row in rows]
    assert max(sums) <= 100
    assert lengths.sum() / (len(rows) * 100) > 0.985
    # Taking the documents in order, as plain concatenation would, wastes a quarter of the places.
    assert lengths.sum() / (count_rows_in_order(lengths, 100) * 100) < 0.8


def count_rows_in_order(lengths, capacity: int) -> int:
    rows, space = 0, 0
    for length in lengths:
        if length > space:
            rows, space = rows + 1, capacity
        space -= length
    return rows
