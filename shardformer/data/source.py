"""The protocol of everything that `data=` can name."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shardformer.data.prepare import Progress
from shardformer.data.token_folder import FORMAT
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import AnySplit

Say = Callable[[str], object]

SHARE = 0.05  # of validation, and as much for test
MAX_HELD_OUT = 2_000_000  # bytes of text, or ids: more would make an evaluation longer, and no better
NO_IDS = -1  # the largest id of a text


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    field: str = "text"
    share: float | None = None  # of validation, and as much for test; None: 5%, of large sources less
    named_validation: bool = False  # all of a source is for training, as another is for validation
    format: int = FORMAT  # of prepared documents: 1 for runs that started with it
    out: Path | None = None  # the folder of the run, which its data leaves out
    chat_template: str = "auto"
    skips_bad_rows: bool = False
    pairs: bool = False  # reads chosen and rejected of records that have messages too

    def share_of(self, size: int) -> float:
        if self.named_validation:
            return 0.0
        return min(SHARE, MAX_HELD_OUT / max(size, 1)) if self.share is None else self.share


@dataclasses.dataclass(frozen=True)
class OpenedSource:
    """A source under a vocabulary. `check` reads what is stored and raises RunError if it is damaged."""

    name: str
    fingerprint: str
    splits: Mapping[str, AnySplit]
    through_tf: bool = False
    notices: tuple[str, ...] = ()  # about rows that are left out or changed
    check: Callable[..., None] | None = None  # check(remembered=True) skips files that have not changed since the last


class Source(abc.ABC):
    """One or more documents, token files, a prepared folder or TFRecords."""

    name: str
    fixed_splits = False  # splits that no requested share changes
    is_text = False  # a tokenizer can be trained on it
    is_chat = False  # its conversations become text by a chat template
    has_chat = False  # conversations of prepared data
    vocabulary: Vocabulary | None = None  # that the source was tokenised with

    @abc.abstractmethod
    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource: ...

    def largest_id(self) -> int:
        """Returns the largest token id, NO_IDS for a text."""
        return NO_IDS

    def sample(self) -> Iterator[str]:
        """Yields training text, on which a tokenizer is trained."""
        raise NotImplementedError(f"{self.name} is not text")

    def characters(self, *splits: str) -> set[str]:
        """Returns the distinct characters of these splits."""
        raise NotImplementedError(f"{self.name} is not text")
