"""Rows of conversations: whole ones, packed by best fit, with the loss on what assistants write."""

import bisect
import dataclasses
import functools
from typing import ClassVar

import numpy as np

from shardformer.data.tokens import Tokens
from shardformer.data.windows import Batch, RowLayout, Windows
from shardformer.errors import UsageError
from shardformer.tables import format_count

SCANNED = 1 << 24  # tokens of a split's mask that are read at a time


@dataclasses.dataclass(frozen=True)
class ChatSplit:
    """The conversations of one split: their ids, where each one ends, and 1 for every token with a loss."""

    is_chat: ClassVar[bool] = True
    is_pairs: ClassVar[bool] = False

    tokens: Tokens
    ends: np.ndarray
    learned: Tokens

    def make_windows(self, layout: RowLayout) -> "ChatWindows":
        return ChatWindows(self, layout)

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        return [describe_rows(name, self.make_windows(layout))]

    @functools.cached_property
    def trained_ends(self) -> np.ndarray:
        """The positions behind the last token of each run of tokens with a loss; a run ends with its conversation."""
        result, ends = [np.zeros(0, np.int64)], np.asarray(self.ends, np.int64)
        for start in range(0, len(self.learned), SCANNED):
            mask = self.learned.take(start, min(SCANNED + 1, len(self.learned) - start))
            count = min(SCANNED, len(mask))
            is_end = np.append(mask[1:] == 0, True)[:count]
            is_end[ends[(ends > start) & (ends <= start + count)] - start - 1] = True
            result.append(start + 1 + np.flatnonzero((mask[:count] == 1) & is_end))
        return np.concatenate(result)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The conversations of a split in rows of one length."""

    starts: np.ndarray  # of the conversations that remain
    lengths: np.ndarray
    cut: int  # that end before a turn that does not fit
    too_long: int  # that are left out, as their first turn does not fit
    without_loss: int  # that are left out, as no token of them has a loss


def fit_conversations(split: ChatSplit, capacity: int) -> Fit:
    """Cuts the conversations of more than `capacity` tokens behind the last turn of an assistant that fits.

    Those whose first turn does not fit are left out.
    """
    ends = np.asarray(split.ends, np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    last = np.searchsorted(split.trained_ends, ends, side="right")  # turns that end by then
    first = np.searchsorted(split.trained_ends, starts, side="right")
    has_loss, is_long = last > first, ends - starts > capacity
    fitting = np.searchsorted(split.trained_ends, np.minimum(ends, starts + capacity), side="right")
    can_be_cut = has_loss & is_long & (fitting > first)
    borders = split.trained_ends[np.maximum(fitting - 1, 0)] if len(split.trained_ends) else ends
    retained = has_loss & (~is_long | can_be_cut)
    lengths = np.where(can_be_cut, borders, ends) - starts
    return Fit(
        starts[retained],
        lengths[retained],
        cut=int(can_be_cut.sum()),
        too_long=int((has_loss & is_long & ~can_be_cut).sum()),
        without_loss=int((~has_loss).sum()),
    )


class ChatWindows(Windows):
    """Rows of seq + 1 tokens, each with one or more conversations."""

    def __init__(self, split: ChatSplit, layout: RowLayout):
        if layout.mask_prompt:
            raise UsageError("mask_prompt=true is for records with prompt and completion; leave it out for chat data")
        if layout.pack and not layout.mask_documents:
            raise UsageError("chat data in packed rows needs documents=masked or padded; Corpus.adapt gives it")
        self.split, self.layout, self.capacity = split, layout, layout.seq + 1
        self.fit = fit_conversations(split, self.capacity)
        if layout.pack:
            rows = pack_best_fit(self.fit.lengths, self.capacity)
        else:
            rows = [[n] for n in range(len(self.fit.lengths))]
        self._members = np.array([n for row in rows for n in sorted(row)], np.int64)
        self._borders = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        self.count = self.covering = len(rows)
        if not rows:
            raise UsageError(f"{describe_rows(split.tokens.name, self)}; give a larger seq")

    @property
    def efficiency(self) -> float:
        """The share of the positions in all rows that have a token."""
        return float(self.fit.lengths.sum()) / max(self.count * self.capacity, 1)

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        shape = len(rows), self.capacity
        ids, trained = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        documents = np.zeros(shape, np.int32)
        for number, row in enumerate(np.asarray(rows).tolist()):
            if row < self.count:
                self._fill(ids[number], trained[number], documents[number], row)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": trained[:, 1:]}
        if self.layout.mask_documents:
            batch["documents"] = documents[:, :-1]
        return batch

    def _fill(self, ids: np.ndarray, trained: np.ndarray, documents: np.ndarray, row: int) -> None:
        members = self._members[self._borders[row] : self._borders[row + 1]]
        spans = list(zip(self.fit.starts[members].tolist(), self.fit.lengths[members].tolist(), strict=True))
        fill_row(self.split, spans, ids, trained, documents)


def describe_rows(name: str, windows: ChatWindows) -> str:
    """Returns a line with what is included, left out and cut, and how full the rows are."""
    fit, seq = windows.fit, windows.layout.seq
    total = len(fit.lengths) + fit.too_long + fit.without_loss
    changed = {
        f"left out: the first turn does not fit in seq={seq}": fit.too_long,
        f"cut behind the last turn that fits in seq={seq}": fit.cut,
        "left out: no assistant writes in them": fit.without_loss,
    }
    parts = [f"{len(fit.lengths):,} of {total:,} conversations in {format_count(windows.count, 'row')}"]
    parts += [f"{100 * windows.efficiency:.1f}% of their positions hold tokens"]
    parts += [f"{count:,} {reason}" for reason, count in changed.items() if count]
    return f"{name}: {'; '.join(parts)}"


def fill_row(
    split: ChatSplit, spans: list[tuple[int, int]], ids: np.ndarray, trained: np.ndarray, documents: np.ndarray
) -> None:
    """Writes conversations of a split, each (start, length), into a row; padding is a separate document."""
    position = 0
    for number, (start, length) in enumerate(spans):
        end = position + length
        ids[position:end] = split.tokens.take(start, length)
        trained[position:end] = split.learned.take(start, length)
        trained[position] = 0  # no token of the same conversation is before it
        documents[position:end] = number
        position = end
    documents[position:] = len(spans)


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Returns the indices of the documents in each row.

    Documents are taken from the longest to the shortest; each goes into the row with the least space that fits it.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # indices of rows by their space
    spaces: list[int] = []  # the spaces of all open rows, sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        position = bisect.bisect_left(spaces, length)
        if position < len(spaces):
            space = spaces[position]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[position]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        left = space - length
        if left not in by_space:
            by_space[left] = []
            bisect.insort(spaces, left)
        by_space[left].append(row)
    return rows
