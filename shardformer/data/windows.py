"""Rows of a batch from a split: `seq` tokens, the targets that follow them, and their weights."""

import abc
import dataclasses
from typing import ClassVar, Protocol

import numpy as np

from shardformer.data.order import random_draws
from shardformer.data.tokens import Tokens, compact
from shardformer.errors import UsageError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The division of documents into rows."""

    seq: int
    pack: bool = True  # rows run across documents; else a row has one document, and padding after it
    mask_documents: bool = False  # rows number their documents, and no token attends to another document
    mask_prompt: bool = False  # prompts are read but have no loss
    sft_tokens: str = ""  # of preference pairs, the targets of the SFT term: answer or all; empty: none
    measures_kl: bool = False  # rows of preference pairs have the answers of another pair behind their prompts as well
    marks_last: bool = False  # of preference pairs, the last token of each answer is the scored one
    answer_tokens: int = 0  # room behind prompts for answers that the model samples

    @property
    def weighs_targets(self) -> bool:
        """Returns whether training rows carry weights: equal targets need none."""
        return not self.pack or self.mask_documents or self.mask_prompt


class Windows(abc.ABC):
    """The rows of one split.

    The first `count` rows are full. The first `covering` rows hold every target, with padding in the last one.
    """

    count: int
    covering: int
    slack = 0  # the largest offset that an epoch adds to the starts of all rows; 0 if seq divides the targets

    @abc.abstractmethod
    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        """Returns the rows of these indices: tokens, targets and weights, and documents if they are masked.

        weighted=False leaves the weights out, which is for full rows.
        """

    def rows_in_file_order(self, step: int, batch: int) -> np.ndarray:
        """Returns the rows of a step of order=file."""
        return (step * batch + np.arange(batch, dtype=np.int64)) % self.count

    def draw(self, positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows, shifts) of order=random, drawn with replacement."""
        return random_draws(positions, self.count, seed), np.zeros_like(positions)


class AnyTokens(Protocol):
    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...


class AnySplit(Protocol):
    """The tokens of one split of one source."""

    is_chat: ClassVar[bool]  # conversations, or pairs of them
    is_pairs: ClassVar[bool]  # preference pairs

    @property
    def tokens(self) -> AnyTokens: ...

    def make_windows(self, layout: RowLayout) -> Windows: ...

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        """Returns lines about how the split of the source `name` is laid out in rows."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The token ids of one split, and the borders of their documents."""

    is_chat: ClassVar[bool] = False
    is_pairs: ClassVar[bool] = False

    tokens: Tokens
    ends: np.ndarray | None = None  # where each document ends; None: one document
    prompts: np.ndarray | None = None  # how many of each document's first tokens are a prompt

    @staticmethod
    def of_ids(ids: np.ndarray, name: str = "text") -> "Split":
        return Split(Tokens([compact(ids)], name))

    def make_windows(self, layout: RowLayout) -> "TokenWindows":
        return PackedWindows(self, layout) if layout.pack else DocumentWindows(self, layout)

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        return []


class TokenWindows(Windows):
    """The rows of one split of token ids."""

    def __init__(self, split: Split, layout: RowLayout):
        self.split, self.layout = split, layout
        if layout.mask_prompt and split.prompts is None:
            raise UsageError(
                f"mask_prompt=true needs prompts, which {split.tokens.name} does not have: they come from .jsonl files "
                "whose records have the fields prompt and completion"
            )

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        starts, ends = self._spans(rows, shifts)
        seq = self.layout.seq
        ids = np.zeros((len(starts), seq + 1), np.int32)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            ids[row, : end - start] = self.split.tokens.take(start, end - start)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        if not weighted:
            return batch
        targets = starts[:, None] + np.arange(1, seq + 1)
        weights = targets < ends[:, None]
        if self.layout.mask_documents or self.layout.mask_prompt:
            weights &= self._mask(batch, targets)
        return batch | {"weights": weights.astype(np.float32)}

    @abc.abstractmethod
    def _spans(self, rows: np.ndarray, shifts: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Returns where in the split each row starts and ends, at most seq + 1 tokens later."""

    def _mask(self, batch: Batch, targets: np.ndarray) -> np.ndarray:
        """Returns which targets count: none of a prompt and, with masked documents, no first token of a document."""
        of_target, starts = self._find_documents(targets)
        counts = np.ones(targets.shape, bool)
        if self.layout.mask_prompt and self.split.prompts is not None:
            counts &= targets - starts >= self.split.prompts[of_target]
        if self.layout.mask_documents:
            of_token, _ = self._find_documents(targets - 1)
            counts &= of_token == of_target
            batch["documents"] = (of_token - of_token[:, :1]).astype(np.int32)
        return counts

    def _find_documents(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document of each position, and where that document starts; padding is in the last."""
        ends = self.split.ends
        if ends is None:
            return np.zeros_like(positions), np.zeros_like(positions)
        document = np.searchsorted(ends, positions, side="right")
        document = np.minimum(document, len(ends) - 1)
        return document, np.where(document > 0, ends[document - 1], 0)


class PackedWindows(TokenWindows):
    """Adjacent rows across documents: every token but the first is a target once."""

    def __init__(self, split: Split, layout: RowLayout):
        super().__init__(split, layout)
        targets = max(len(split.tokens) - 1, 0)
        self.count, self.slack = divmod(targets, layout.seq)
        self.covering = -(-targets // layout.seq)
        self._starts = max(targets - layout.seq + 1, 0)  # positions where a row may begin

    def draw(self, positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows that begin at any token."""
        return np.zeros_like(positions), random_draws(positions, self._starts, seed)

    def _spans(self, rows: np.ndarray, shifts: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        starts = np.minimum(rows * self.layout.seq + shifts, len(self.split.tokens) - 1)
        return starts, np.minimum(starts + self.layout.seq + 1, len(self.split.tokens))


class DocumentWindows(TokenWindows):
    """Rows of one document each; a longer document fills two or more, so that nothing of it is lost."""

    def __init__(self, split: Split, layout: RowLayout):
        super().__init__(split, layout)
        ends = np.array([len(split.tokens)]) if split.ends is None else split.ends
        self._ends = ends
        lengths = np.diff(ends, prepend=0)
        self._last_rows = np.cumsum(-(-np.maximum(lengths - 1, 0) // layout.seq))
        self.count = self.covering = int(self._last_rows[-1]) if len(ends) else 0

    def _spans(self, rows: np.ndarray, shifts: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        document = np.searchsorted(self._last_rows, rows, side="right")
        document = np.minimum(document, len(self._ends) - 1)
        first_row = np.where(document > 0, self._last_rows[document - 1], 0)
        first = np.where(document > 0, self._ends[document - 1], 0)
        starts = first + (rows - first_row) * self.layout.seq
        padding = rows >= self.count
        ends = np.minimum(starts + self.layout.seq + 1, self._ends[document])
        return np.where(padding, 0, starts), np.where(padding, 0, ends)
