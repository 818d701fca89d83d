"""Rows of a batch cut from a split: `seq` tokens, the tokens that follow them, and which of those count."""

import dataclasses

import numpy as np

from shardformer.data.tokens import Split
from shardformer.errors import UsageError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How rows are cut from documents."""

    seq: int
    pack: bool = True  # rows cut across documents; else one document a row, the rest of it padding
    mask_documents: bool = False  # a row says which of its tokens belong to one document
    mask_prompt: bool = False  # prompts are read and not learned

    @property
    def weighs_targets(self) -> bool:
        """Whether training rows carry weights: where all targets count alike they need none."""
        return not self.pack or self.mask_documents or self.mask_prompt


class Windows:
    """The rows of one split. `count` of them are full; `covering` of them hold every target, the last one padded."""

    slack = 0  # how far the full rows may be shifted, all of them at once

    def __init__(self, split: Split, layout: RowLayout):
        self.split, self.layout = split, layout
        if layout.mask_prompt and split.prompts is None:
            raise UsageError(
                f"mask_prompt=true needs prompts, which {split.tokens.name} does not have: they come from .jsonl files "
                "whose records have the fields prompt and completion"
            )

    @staticmethod
    def make(split: Split, layout: RowLayout) -> "Windows":
        if isinstance(split, Split):
            return PackedWindows(split, layout) if layout.pack else DocumentWindows(split, layout)
        return split.make_windows(layout)

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        """The rows with these numbers: tokens, targets and weights, and documents where they are masked.

        weighted=False leaves the weights out, of rows that are full.
        """
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

    def rows_in_file_order(self, step: int, batch: int) -> np.ndarray:
        """The rows of a step, where they are read one after the other."""
        return (step * batch + np.arange(batch, dtype=np.int64)) % self.count

    def _spans(self, rows: np.ndarray, shifts) -> tuple[np.ndarray, np.ndarray]:
        """Where in the split each row starts, and where what it holds ends: at most seq + 1 further."""
        raise NotImplementedError

    def _mask(self, batch: Batch, targets: np.ndarray) -> np.ndarray:
        """Which targets count: not those of a prompt and, with masked documents, not the first of another document."""
        positions = np.minimum(targets, len(self.split.tokens) - 1)
        of_target, begins = self._find_documents(positions)
        counts = np.ones(targets.shape, bool)
        if self.layout.mask_prompt:
            counts &= positions - begins >= self.split.prompts[of_target]
        if self.layout.mask_documents:
            of_token, _ = self._find_documents(targets - 1)
            counts &= of_token == of_target
            batch["documents"] = (of_token - of_token[:, :1]).astype(np.int32)
        return counts

    def _find_documents(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The document that holds each position, and where that document begins."""
        ends = self.split.ends
        if ends is None:
            return np.zeros_like(positions), np.zeros_like(positions)
        document = np.searchsorted(ends, positions, side="right")
        document = np.minimum(document, len(ends) - 1)
        return document, np.where(document > 0, ends[document - 1], 0)


class PackedWindows(Windows):
    """Rows side by side, across documents: every token but the first is a target once."""

    def __init__(self, split: Split, layout: RowLayout):
        super().__init__(split, layout)
        targets = max(len(split.tokens) - 1, 0)
        self.count, self.slack = divmod(targets, layout.seq)
        self.covering = -(-targets // layout.seq)
        self.starts = max(targets - layout.seq + 1, 0)  # places where a row may begin

    def _spans(self, rows, shifts):
        starts = np.minimum(rows * self.layout.seq + shifts, len(self.split.tokens) - 1)
        return starts, np.minimum(starts + self.layout.seq + 1, len(self.split.tokens))


class DocumentWindows(Windows):
    """One document a row; a longer one takes several, so that nothing of it is lost."""

    def __init__(self, split: Split, layout: RowLayout):
        super().__init__(split, layout)
        ends = np.array([len(split.tokens)]) if split.ends is None else split.ends
        self._ends = ends
        lengths = np.diff(ends, prepend=0)
        self._last_rows = np.cumsum(-(-np.maximum(lengths - 1, 0) // layout.seq))
        self.count = self.covering = int(self._last_rows[-1]) if len(ends) else 0

    def _spans(self, rows, shifts):
        document = np.searchsorted(self._last_rows, rows, side="right")
        document = np.minimum(document, len(self._ends) - 1)
        first_row = np.where(document > 0, self._last_rows[document - 1], 0)
        begins = np.where(document > 0, self._ends[document - 1], 0)
        starts = begins + (rows - first_row) * self.layout.seq
        padding = rows >= self.count
        ends = np.minimum(starts + self.layout.seq + 1, self._ends[document])
        return np.where(padding, 0, starts), np.where(padding, 0, ends)
