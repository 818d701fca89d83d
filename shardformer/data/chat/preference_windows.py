"""Rows of preference pairs: [2, seq] tokens, chosen and rejected, each pair complete or left out."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from shardformer.data.chat.chat_windows import ChatSplit, fill_row, pack_best_fit
from shardformer.data.windows import Batch, RowLayout, Windows
from shardformer.errors import UsageError
from shardformer.tables import format_count

MOST_PAIRS = 16  # in one packed row; the size of the arrays of pairs, which is the same in every batch


@dataclasses.dataclass(frozen=True)
class PreferenceSplit(ChatSplit):
    """The pairs of one split: documents 2n and 2n + 1 are the chosen and the rejected side of pair n."""

    is_pairs: ClassVar[bool] = True
    references: np.ndarray | None = None  # log-probabilities [pairs, 2 or 4] under the model that training starts from

    def make_windows(self, layout: RowLayout) -> "PreferenceWindows":  # type: ignore[override]
        return PreferenceWindows(self, layout)

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        return [describe_pairs(name, self.make_windows(layout))]

    @property
    def count(self) -> int:
        """The number of pairs, with those that do not fit in a row."""
        return len(self.ends) // 2

    @functools.cached_property
    def scored(self) -> np.ndarray:
        """The number of scored tokens of each side, [pairs, 2]."""
        ends = np.asarray(self.ends, np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        counts = [
            int(self.learned.take(int(start), int(end - start)).sum()) for start, end in zip(starts, ends, strict=True)
        ]
        return np.array(counts, np.int64).reshape(-1, 2)


class PreferenceWindows(Windows):
    """Rows of seq + 1 tokens for each side. With masked documents, a row has up to MOST_PAIRS pairs, else one.

    A pair of which a side is longer than a row is left out: no side is ever cut.
    """

    def __init__(self, split: PreferenceSplit, layout: RowLayout):
        if layout.mask_prompt:
            raise UsageError("mask_prompt=true is for records with prompt and completion; leave it out for pairs")
        self.split, self.layout, self.capacity = split, layout, layout.seq + 1
        ends = np.asarray(split.ends, np.int64)
        self._starts = np.concatenate([[0], ends[:-1]]).astype(np.int64).reshape(-1, 2)
        # A template may end a turn with a line feed behind the answer, which a policy does not sample.
        ends = find_answer_ends(split) if layout.marks_last else ends
        self._lengths = ends.reshape(-1, 2) - self._starts
        # The last of the seq + 1 tokens of a row is a target only: a model reads nothing at it.
        self._longest = layout.seq if layout.marks_last else self.capacity
        fits = (self._lengths <= self._longest).all(1)
        has_score = (split.scored > 0).all(1)
        self.too_long, self.without_score = int((~fits).sum()), int((fits & ~has_score).sum())
        self.pairs = np.flatnonzero(fits & has_score)
        self._rows = self._choose_rows()
        self.count = self.covering = len(self._rows)
        if not self._rows:
            raise UsageError(f"{describe_pairs(split.tokens.name, self)}; give a larger seq")

    def _choose_rows(self) -> list[list[int]]:
        """Returns the pairs of each row."""
        if not (self.layout.pack and self.layout.mask_documents):
            return [[int(pair)] for pair in self.pairs]
        rows = pack_best_fit(self._lengths[self.pairs].max(1), self._longest)
        parts = [row[n : n + MOST_PAIRS] for row in map(sorted, rows) for n in range(0, len(row), MOST_PAIRS)]
        return [[int(self.pairs[n]) for n in part] for part in parts]

    @property
    def pairs_of_a_row(self) -> int:
        """The size of the arrays of pairs."""
        return MOST_PAIRS if self.layout.mask_documents else 1

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        """Returns tokens, targets and `scored` [R, 2, T], and `pairs` [R, K]: 1 for every pair of a row.

        `scored` is 1 for the targets of an answer, or with marks_last at the last token of the answer of each side.
        `documents` [R, 2, T] number the pairs of packed rows; `references` are [R, 2, K].
        """
        shape, slots = (len(rows), 2, self.capacity), self.pairs_of_a_row
        ids, scored, documents = (np.zeros(shape, dtype) for dtype in (np.int32, np.float32, np.int32))
        pairs, references = np.zeros((len(rows), slots), np.float32), np.zeros((len(rows), 2, slots), np.float32)
        for number, row in enumerate(np.asarray(rows).tolist()):
            members = self._rows[row] if row < self.count else []
            pairs[number, : len(members)] = 1
            if self.split.references is not None:
                references[number, :, : len(members)] = self.split.references[members, :2].T
            for side in range(2):
                self._fill(ids[number, side], scored[number, side], documents[number, side], members, side)
        batch = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "scored": scored[..., 1:], "pairs": pairs}
        if self.layout.mask_documents:
            batch["documents"] = documents[..., :-1]
        if self.split.references is not None:
            batch["references"] = references
        if self.layout.sft_tokens:
            batch["sft"] = self._select_sft(batch, documents)
        return batch | self._gather_mismatched(rows) if self.layout.measures_kl else batch

    def _fill(self, ids: np.ndarray, scored: np.ndarray, documents: np.ndarray, members: list[int], side: int) -> None:
        """Writes one side of the pairs of a row."""
        starts, lengths = self._starts[members, side].tolist(), self._lengths[members, side].tolist()
        fill_row(self.split, list(zip(starts, lengths, strict=True)), ids, scored, documents)
        if self.layout.marks_last:
            scored[:] = 0
            # `gather` drops the first entry, so that entry n marks token n - 1.
            scored[np.cumsum(lengths, dtype=np.int64)] = 1

    def _gather_mismatched(self, rows: np.ndarray) -> Batch:
        """Returns each prompt with the answers of the pair before it, as in TRL: `kl_pairs` [R, 2] is 1 where one fits.

        They measure how far the model is from its reference, and have no gradient.
        """
        shape = len(rows), 2, self.capacity
        ids, scored = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        fits, references = np.zeros(shape[:2], np.float32), np.zeros(shape[:2], np.float32)
        for number, row in enumerate(np.asarray(rows).tolist()):
            for side in range(2) if row < self.count else ():
                joined, mask = self._join_mismatched(row, side)
                if len(joined) > self.capacity:
                    continue
                ids[number, side, : len(joined)], scored[number, side, : len(joined)] = joined, mask
                fits[number, side] = 1
                if self.split.references is not None:
                    references[number, side] = self.split.references[self.pairs[row], 2 + side]
        result = {"kl_tokens": ids[..., :-1], "kl_targets": ids[..., 1:], "kl_scored": scored[..., 1:]}
        with_references = {} if self.split.references is None else {"kl_references": references}
        return result | {"kl_pairs": fits} | with_references

    def _join_mismatched(self, row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the prompt of a row's pair and the scored rest of the pair before it: ids, and a mask."""
        parts = []
        for pair in (self.pairs[row], self.pairs[row - 1]):
            start, length = int(self._starts[pair, side]), int(self._lengths[pair, side])
            ids, scored = self.split.tokens.take(start, length), self.split.learned.take(start, length)
            parts.append((ids, scored, int(np.argmax(scored))))
        (ids, _, prompt), (other, mask, first) = parts
        return np.concatenate([ids[:prompt], other[first:]]), np.concatenate([np.zeros(prompt), mask[first:]])

    def _select_sft(self, batch: Batch, documents: np.ndarray) -> np.ndarray:
        """Returns 1 for the targets [R, T] of the SFT term: those of the chosen answers, or of their prompts too."""
        if self.layout.sft_tokens == "answer":
            return batch["scored"][:, 0]
        of_token, of_target = documents[:, 0, :-1], documents[:, 0, 1:]
        counts = batch["pairs"].sum(1, keepdims=True)
        return ((of_token == of_target) & (of_target < counts)).astype(np.float32)

    def rows_of_pairs(self, row: int) -> list[int]:
        """Returns the numbers of the pairs of a row, in their order."""
        return self._rows[row]


def find_answer_ends(split: PreferenceSplit) -> np.ndarray:
    """Returns the position behind the last scored token of each side, or behind a side without scored tokens."""
    ends = np.asarray(split.ends, np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    answers = np.append(0, split.trained_ends)  # also where no side has a scored token
    last = answers[np.searchsorted(split.trained_ends, ends, side="right")]
    return np.where(last > starts, last, ends)


def describe_pairs(name: str, windows: PreferenceWindows) -> str:
    """Returns a line with the numbers of pairs in rows and of pairs that are left out."""
    seq, total = windows.layout.seq, windows.split.count
    rows = format_count(len(windows._rows), "row")
    parts = [f"{len(windows.pairs):,} of {total:,} preference pairs in {rows} of two sides"]
    changed = {
        f"left out: a side is longer than seq={seq}, and no side is cut": windows.too_long,
        "left out: a side has no scored token": windows.without_score,
    }
    parts += [f"{count:,} {reason}" for reason, count in changed.items() if count]
    return f"{name}: {'; '.join(parts)}"
