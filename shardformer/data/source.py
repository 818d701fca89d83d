"""The protocol of everything that `data=` can name, and texts in memory."""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from shardformer.data.text_cuts import cut_text
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import AnySplit, Split

Progress = Callable[[int, int], object]  # (bytes done, of how many)

TAKES = (
    "data takes auto, tiny_shakespeare, builtin, tfds:NAME, a text file, a folder or a glob of them, .jsonl, .json, "
    ".gz or .zst, .bin or .npy token files, an index of TFRecords (.index), a folder made by `data prepare`, or "
    "several with weights: a.bin=3,b.bin=1; files and folders may be in a bucket: gs://BUCKET/..."
)
SHARE = 0.05  # of validation, and as much for test
MAX_HELD_OUT = 2_000_000  # bytes of text, or ids: more would make an evaluation longer, and no better
LARGER_SHARES = (0.1, 0.2)  # of a source with few documents, if no hash of one falls into its share
NO_IDS = -1  # the largest id of a text


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    field: str = "text"
    share: float | None = None  # of validation, and as much for test; None: 5%, of large sources less
    named_validation: bool = False  # all of a source is for training, as another is for validation
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

    def with_share(self, share: float) -> "Source":
        """Returns the source with a larger share for validation, if hashes choose it and the share was not smaller."""
        return self

    def largest_id(self) -> int:
        """Returns the largest token id, NO_IDS for a text."""
        return NO_IDS

    def sample(self) -> Iterator[str]:
        """Yields training text, on which a tokenizer is trained."""
        raise NotImplementedError(f"{self.name} is not text")

    def characters(self, *splits: str) -> set[str]:
        """Returns the distinct characters of these splits."""
        raise NotImplementedError(f"{self.name} is not text")


class Texts(Source):
    """A text of three splits in memory: tiny_shakespeare, the built-in corpus, one text file.

    through_tf: tf.data carries the batches, for texts that TensorFlow Datasets has loaded: TensorFlow is imported
    already. For the other texts, its import would take longer than all other parts of a start.
    """

    is_text = True

    def __init__(self, name: str, texts: tuple[str, str, str], fixed_splits: bool = True, through_tf: bool = False):
        self.name, self.texts, self.fixed_splits, self.through_tf = name, texts, fixed_splits, through_tf

    def sample(self) -> Iterator[str]:
        return iter(cut_text(self.texts[0]))

    def characters(self, *splits: str) -> set[str]:
        by_split = dict(zip(SPLITS, self.texts, strict=True))
        return set().union(*(by_split[split] for split in splits))

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        names = [f"{split} split of {self.name}" for split in SPLITS]
        ids = [vocabulary.encode(text, name) for text, name in zip(self.texts, names, strict=True)]
        ids[0] = np.concatenate([np.array(vocabulary.beginning, np.int32), ids[0]])
        splits = {split: Split.of_ids(part, self.name) for split, part in zip(SPLITS, ids, strict=True) if len(part)}
        return OpenedSource(self.name, _fingerprint_texts(self.texts), splits, through_tf=self.through_tf)


def split_text(text: str, share: float) -> tuple[str, str, str]:
    """Returns train, validation and test, in that order: with 5% as TFDS splits tiny_shakespeare."""
    train_end = int(len(text) * (1 - 2 * share))
    validation_end = train_end + int((len(text) - train_end) * 0.5)
    return text[:train_end], text[train_end:validation_end], text[validation_end:]


def _fingerprint_texts(texts: tuple[str, str, str]) -> str:
    """Returns a sha256 of the three splits."""
    lengths = ",".join(str(len(text)) for text in texts)
    return hashlib.sha256((lengths + "".join(texts)).encode()).hexdigest()
