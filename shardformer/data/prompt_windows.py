"""Rows of prompts for sampled answers: a record in each row, its last answer as the expected one."""

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from shardformer.data.windows import AnySplit, AnyTokens, Batch, RowLayout, Windows
from shardformer.errors import UsageError

SCANNED = 1024  # rows that are read at a time to find where their prompts end


class PromptRow(NamedTuple):
    """The ids of one row."""

    prompt: list[int]
    expected: list[int]  # the record's own answer


@dataclasses.dataclass(frozen=True)
class PromptSplit:
    """A split of records with a mask, whose last run of tokens with a loss is the expected answer."""

    is_chat: ClassVar[bool] = False
    is_pairs: ClassVar[bool] = False
    split: AnySplit
    answer_tokens: int  # room that a row has behind its prompt

    @property
    def tokens(self) -> AnyTokens:
        return self.split.tokens

    def make_windows(self, layout: RowLayout) -> "PromptWindows":
        return PromptWindows(self, layout)

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        return [describe_prompts(name, self.make_windows(layout))]


class PromptWindows(Windows):
    """The rows whose prompt leaves room for an answer. No prompt is ever cut."""

    def __init__(self, split: PromptSplit, layout: RowLayout):
        self._rows = split.split.make_windows(layout)
        self.answer_tokens = split.answer_tokens
        most = layout.seq + 1 - split.answer_tokens
        lengths = [
            len(row.prompt)
            for start in range(0, self._rows.count, SCANNED)
            for row in read_prompts(self._rows.gather(np.arange(start, min(start + SCANNED, self._rows.count))))
        ]
        self._kept = np.flatnonzero((np.array(lengths) > 0) & (np.array(lengths) <= most))
        self.total, self.count = len(lengths), len(self._kept)
        self.covering = self.count
        if not self.count:
            raise UsageError(
                f"{split.tokens.name}: no prompt leaves room for answer_tokens={split.answer_tokens} in "
                f"seq={layout.seq}; give a larger seq"
            )

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        rows = np.asarray(rows)
        inside = np.minimum(rows, self.count - 1)
        beyond = np.where(rows < self.count, self._kept[inside], self._rows.count)  # a row of padding
        return self._rows.gather(beyond)


def read_prompts(batch: Batch) -> list[PromptRow]:
    """Returns the prompt and the expected answer of each row, its last run of tokens with a loss. Padding has none."""
    result = []
    for tokens, targets, weights in zip(batch["tokens"], batch["targets"], batch["weights"], strict=True):
        scored = np.flatnonzero(weights > 0)
        if not len(scored):
            result.append(PromptRow([], []))
            continue
        first = int(scored[np.flatnonzero(np.diff(scored, prepend=-2) > 1)[-1]])
        result.append(PromptRow(tokens[: first + 1].tolist(), targets[first : scored[-1] + 1].tolist()))
    return result


def describe_prompts(name: str, windows: PromptWindows) -> str:
    """Returns a line with the number of prompts that are used, and why the others are not."""
    left_out = windows.total - windows.count
    reason = f"; {left_out:,} left out, without room for answer_tokens={windows.answer_tokens}" if left_out else ""
    return f"{name}: {windows.count:,} of {windows.total:,} prompts{reason}"
