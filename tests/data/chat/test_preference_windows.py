"""The answers to another prompt that KTO's divergence is measured on, last tokens, and pairs that do not fit."""

import dataclasses

import numpy as np
import pytest

from shardformer.data.chat.preference_windows import PreferenceSplit, PreferenceWindows
from shardformer.data.tokens import Tokens
from shardformer.data.windows import RowLayout
from shardformer.errors import UsageError

# Pair n has the prompt 10 n, 10 n + 1; its chosen answer is 10 n + 2, 10 n + 3 and its rejected one 10 n + 4.
PROMPTS = [[10, 11], [20, 21], [30, 31]]
ANSWERS = [[[12, 13], [14]], [[22, 23], [24]], [[32, 33], [34]]]


def make_windows(seq: int = 8, behind: tuple[int, ...] = (), **layout) -> PreferenceWindows:
    """Returns the rows of the pairs; `behind` are tokens behind each answer, which have no score."""
    ids, scored, ends = [], [], []
    for prompt, sides in zip(PROMPTS, ANSWERS, strict=True):
        for answer in sides:
            ids += [*prompt, *answer, *behind]
            scored += [0] * len(prompt) + [1] * len(answer) + [0] * len(behind)
            ends.append(len(ids))
    references = np.arange(12, dtype=np.float32).reshape(3, 4)  # of the sides, and of the sides of the other pair
    tokens, learned = Tokens([np.array(ids, np.uint16)], "TEST"), Tokens([np.array(scored, np.uint8)], "TEST")
    return PreferenceSplit(tokens, np.array(ends), learned, references).make_windows(RowLayout(seq, **layout))


def test_divergence_is_of_the_answers_of_the_pair_before():
    batch = make_windows(measures_kl=True).gather(np.arange(3))
    for row in range(3):
        for side in range(2):
            ids = [*PROMPTS[row], *ANSWERS[row - 1][side]]
            assert batch["kl_tokens"][row, side, : len(ids)].tolist() == ids
            scored = batch["kl_targets"][row, side][batch["kl_scored"][row, side] > 0]
            assert scored.tolist() == ANSWERS[row - 1][side]
    assert (batch["kl_pairs"] == 1).all()


def test_divergence_has_the_reference_of_its_side():
    batch = make_windows(measures_kl=True).gather(np.array([2, 0]))
    assert batch["references"][..., 0].tolist() == [[8, 9], [0, 1]]
    assert batch["kl_references"].tolist() == [[10, 11], [2, 3]]


def test_pair_with_one_long_side_is_left_out():
    """Rows of three tokens hold each rejected side, and no chosen one."""
    with pytest.raises(UsageError, match="left out: a side is longer than seq=2"):
        make_windows(seq=2)


@pytest.mark.parametrize("behind", [(), (7, 8)], ids=["", "tokens behind"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_last_token_of_each_side_is_marked(is_packed, behind):
    """Also that of an answer that ends a row, whose last token is no target of a language model's row."""
    windows = make_windows(seq=8 if is_packed else 4, behind=behind, marks_last=True, mask_documents=is_packed)
    batch = windows.gather(np.arange(windows.count))
    assert windows.count == (2 if is_packed else 3)
    for row in range(windows.count):
        for side in range(2):
            last = batch["tokens"][row, side][batch["scored"][row, side] > 0].tolist()
            assert last == [ANSWERS[pair][side][-1] for pair in windows.rows_of_pairs(row)]


def test_side_without_room_for_its_last_token_is_left_out():
    assert make_windows(seq=3).count == 3
    with pytest.raises(UsageError, match="left out: a side is longer than seq=3"):
        make_windows(seq=3, marks_last=True)


def test_side_without_an_answer_is_left_out():
    """It is the first one, and that of a pair whose other side has an answer."""
    split = make_windows().split
    for first in (0, 1):
        mask = split.learned.take(0, len(split.learned)).copy()
        mask[int(split.ends[first - 1]) if first else 0 : int(split.ends[first])] = 0
        learned = Tokens([mask], "TEST")
        windows = dataclasses.replace(split, learned=learned).make_windows(RowLayout(8, marks_last=True))
        assert windows.pairs.tolist() == [1, 2]
        assert (windows.too_long, windows.without_score) == (0, 1)
