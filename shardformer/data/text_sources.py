"""Sources of text: one in memory, or many files that are tokenised into the cache."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardformer.data import text_files
from shardformer.data.prepare import Progress, prepare
from shardformer.data.recipe import Recipe
from shardformer.data.source import OpenedSource, Source
from shardformer.data.token_folder import TokenFolder
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import Split
from shardformer.errors import RunError
from shardformer.files import make_folder
from shardformer.storage import cache_folder

SAMPLED = 64 << 20  # bytes of text that a tokenizer is trained on


class Texts(Source):
    """A text of three splits in memory: tiny_shakespeare, the built-in corpus, one text file.

    through_tf: tf.data carries the batches, for texts that TensorFlow Datasets has loaded: TensorFlow is imported
    already. For the other texts, its import would take longer than all other parts of a start.
    """

    is_text = True

    def __init__(self, name: str, texts: tuple[str, str, str], fixed_splits: bool = True, through_tf: bool = False):
        self.name, self.texts, self.fixed_splits, self.through_tf = name, texts, fixed_splits, through_tf

    def sample(self) -> Iterator[str]:
        return iter(text_files.cut_text(self.texts[0]))

    def characters(self, *splits: str) -> set[str]:
        by_split = dict(zip(SPLITS, self.texts, strict=True))
        return set().union(*(by_split[split] for split in splits))

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        names = [f"{split} split of {self.name}" for split in SPLITS]
        ids = [vocabulary.encode(text, name) for text, name in zip(self.texts, names, strict=True)]
        ids[0] = np.concatenate([np.array(vocabulary.beginning, np.int32), ids[0]])
        splits = {split: Split.of_ids(part, self.name) for split, part in zip(SPLITS, ids, strict=True) if len(part)}
        return OpenedSource(self.name, _fingerprint_texts(self.texts), splits, through_tf=self.through_tf)


class TextFiles(Source):
    """Documents that are tokenised once, into the cache, and memory-mapped from there."""

    is_text = True

    def __init__(self, recipe: Recipe):
        self.recipe, self.name, self.is_chat = recipe, recipe.name, bool(recipe.chat)
        self._is_checked = False

    def check_encoding(self) -> None:
        """Raises UsageError if a file is not UTF-8; reads the files once."""
        if not self._is_checked:
            self.recipe.check_encoding()
            self._is_checked = True

    def sample(self) -> Iterator[str]:
        """Yields at most about SAMPLED bytes of the training documents, from all over them."""
        self.check_encoding()
        size = sum(path.stat().st_size for path in self.recipe.files)
        for number, piece in enumerate(self.recipe.pieces("train")):
            if size <= SAMPLED or hashlib.sha256(str(number).encode()).digest()[0] * size < 256 * SAMPLED:
                yield piece.prompt + piece.text

    def characters(self, *splits: str) -> set[str]:
        self.check_encoding()
        result: set[str] = set()
        ascii_counts = np.zeros(128, np.int64)
        for piece in self.recipe.pieces(*splits):
            for text in (piece.prompt, piece.text):
                if text.isascii():  # by far the most, and counted 30 times faster than by a set
                    ascii_counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=128)
                else:
                    result.update(text)
        return result | set(map(chr, np.flatnonzero(ascii_counts)))

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        folder = cache_folder() / f"{Path(self.name).stem[:40] or 'text'}-{self.recipe.identify_with(vocabulary)[:16]}"
        try:
            make_folder(folder.parent)
        except OSError as error:
            raise RunError(
                f"the token ids of {self.name} cannot be kept in {folder.parent}: {error.strerror}; set "
                "SHARDFORMER_CACHE to a folder on a disk"
            ) from None
        if folder.exists():
            prepared = TokenFolder.open(folder)
        else:
            self.check_encoding()
            prepared = prepare(self.recipe, vocabulary, folder, progress)
        splits, notices = prepared.splits(), tuple(prepared.rows.describe())
        return OpenedSource(self.name, prepared.fingerprint, splits, notices=notices, check=prepared.check_contents)


def split_text(text: str, share: float) -> tuple[str, str, str]:
    """Returns train, validation and test, in that order: with 5% as TFDS splits tiny_shakespeare."""
    train_end = int(len(text) * (1 - 2 * share))
    validation_end = train_end + int((len(text) - train_end) * 0.5)
    return text[:train_end], text[train_end:validation_end], text[validation_end:]


def _fingerprint_texts(texts: tuple[str, str, str]) -> str:
    """Returns a sha256 of the three splits."""
    lengths = ",".join(str(len(text)) for text in texts)
    return hashlib.sha256((lengths + "".join(texts)).encode()).hexdigest()
