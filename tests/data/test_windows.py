"""Rows of documents: padding, prompts and the borders between documents have no loss."""

import numpy as np
import pytest

from shardformer.data.tokens import Tokens
from shardformer.data.windows import RowLayout, Split
from shardformer.errors import UsageError

ENDS = np.array([3, 3, 10, 12])  # documents of 3, 0, 7 and 2 tokens; each token is its position
SPLIT = Split(Tokens([np.arange(12)], "text"), ENDS, prompts=np.array([1, 0, 4, 0]))


def rows(**cut):
    windows = SPLIT.make_windows(RowLayout(**{"seq": 4} | cut))
    batch = windows.gather(np.arange(windows.covering))
    targets = [row[weight == 1].tolist() for row, weight in zip(batch["targets"], batch["weights"], strict=True)]
    return targets, batch


def test_packed_rows_cut_across_documents():
    assert rows()[0] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]


def test_long_documents_take_several_rows():
    targets, batch = rows(pack=False)
    assert targets == [[1, 2], [4, 5, 6, 7], [8, 9], [11]]
    assert batch["tokens"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 6], [7, 8, 9, 0], [10, 11, 0, 0]]


def test_prompts_have_no_loss():
    assert rows(mask_prompt=True)[0] == [[1, 2], [7, 8], [9, 10, 11]]
    assert rows(mask_prompt=True, pack=False)[0] == [[1, 2], [7], [8, 9], [11]]
    with pytest.raises(UsageError, match="mask_prompt=true needs prompts, which text does not have"):
        Split.of_ids(np.arange(9)).make_windows(RowLayout(4, mask_prompt=True))


def test_masked_documents_are_numbered_and_kept_apart():
    targets, batch = rows(mask_documents=True)
    assert targets == [[1, 2, 4], [5, 6, 7, 8], [9, 11]]
    assert batch["documents"][0].tolist() == [0, 0, 0, 2]
    assert batch["documents"][1].tolist() == [0, 0, 0, 0]


def test_a_document_that_fills_its_rows_has_no_empty_row():
    """Documents of 5, 9 and 1 tokens in rows of 4: one row, two, and none."""
    split = Split(Tokens([np.arange(15)], "text"), np.array([5, 14, 15]))
    windows = split.make_windows(RowLayout(4, pack=False))
    assert (windows.count, windows.covering) == (3, 3)
    batch = windows.gather(np.arange(3))
    assert batch["targets"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9], [10, 11, 12, 13]]
    assert batch["weights"].all()


def test_packed_rows_that_fit_have_no_slack():
    windows = Split.of_ids(np.arange(13)).make_windows(RowLayout(4))
    assert (windows.count, windows.covering, windows.slack) == (3, 3, 0)
    windows = Split.of_ids(np.arange(16)).make_windows(RowLayout(4))
    assert (windows.count, windows.covering, windows.slack) == (3, 4, 3)


def test_rows_past_the_end_are_padding():
    for pack in (True, False):
        windows = SPLIT.make_windows(RowLayout(4, pack))
        assert windows.gather(np.arange(50))["weights"].sum() == sum(map(len, rows(pack=pack)[0]))
