"""Where the text comes from: tiny_shakespeare, the built-in corpus, or any UTF-8 text file."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from shardformer.data import builtin, shakespeare
from shardformer.data.vocabulary import Vocabulary
from shardformer.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Corpus:
    name: str  # the source as it was resolved, so that a resume reads the same
    train: str
    validation: str
    test: str

    @property
    def fingerprint(self) -> str:
        """A sha256 of the three splits: equal exactly where the data is."""
        splits = (self.train, self.validation, self.test)
        lengths = ",".join(str(len(split)) for split in splits)
        return hashlib.sha256((lengths + "".join(splits)).encode()).hexdigest()


def load_corpus(source: str, notify: Callable[[str], object] = print) -> Corpus:
    """The corpus of `source`: auto, tiny_shakespeare, builtin, or the path of a UTF-8 text file."""
    if source == "auto":
        corpus = _shakespeare_or_builtin(notify)
    elif source == "tiny_shakespeare":
        corpus = Corpus(source, *shakespeare.load_splits())
    elif source == "builtin":
        corpus = _split_builtin()
    else:
        corpus = _read_text_file(Path(os.path.expanduser(source)))
    vocabulary = Vocabulary.from_text(corpus.train)
    for split in ("validation", "test"):
        vocabulary.encode(getattr(corpus, split), source=f"{split} split of {corpus.name}")
    return corpus


def _shakespeare_or_builtin(notify: Callable[[str], object]) -> Corpus:
    try:
        return Corpus("tiny_shakespeare", *shakespeare.load_splits())
    except UsageError as reason:
        notify(f"Training on the built-in corpus: the numbers are then not Shakespeare's.\n{reason}")
        return _split_builtin()


def _split_builtin() -> Corpus:
    return Corpus("builtin", *_split_90_5_5(builtin.text()))


def _read_text_file(path: Path) -> Corpus:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"data={path}: there is no such file; data takes auto, tiny_shakespeare, builtin or a text file"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"data={path} is a folder; give the path of a UTF-8 text file in it") from None
    except OSError as error:
        raise UsageError(f"cannot read data={path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data={path} is not UTF-8: {error.reason} (0x{error.object[error.start]:02X}) at byte {error.start}; "
            "convert it, for example with iconv"
        ) from None
    splits = _split_90_5_5(text)
    if min(map(len, splits)) < 2:
        raise UsageError(
            f"data={path} is {'empty' if not text else f'too short ({len(text)} characters)'}: its 90/5/5 split "
            "needs two characters in each part; give a longer text"
        )
    return Corpus(str(path.resolve()), *splits)


def _split_90_5_5(text: str) -> tuple[str, str, str]:
    """90/5/5, contiguous, in that order: as TFDS splits tiny_shakespeare."""
    train_end = int(len(text) * 0.9)
    validation_end = train_end + int((len(text) - train_end) * 0.5)
    return text[:train_end], text[train_end:validation_end], text[validation_end:]
