"""What `data=` names: a text, many texts, token files, a prepared folder, TFRecords; each as splits of token ids."""

import dataclasses
import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardformer.data import builtin, shakespeare, text_files, tfrecords
from shardformer.data.prepare import Progress, Recipe, prepare
from shardformer.data.token_folder import TokenFolder
from shardformer.data.tokens import (
    SPLITS,
    Split,
    describe_largest_id,
    find_largest_id,
    fingerprint_file,
    name_spans,
    open_token_file,
)
from shardformer.data.vocabulary import Vocabulary
from shardformer.errors import UsageError
from shardformer.storage import BucketPath, cache_folder, copy_to_disk, is_url, local_path, location

Say = Callable[[str], object]

IN_MEMORY = 16 << 20  # bytes of one text that is tokenised at every start rather than kept in the cache
LARGE = 1 << 28  # bytes of a token file that is not read through before training
SHARE = 0.05  # of validation, and as much for test
MAX_HELD_OUT = 2_000_000  # bytes of text, or ids: more would make an evaluation longer, and no better
TOKEN_FILES = (".bin", ".npy")
TEXT_FILES = (".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".csv", ".py", ".pyi", ".ipynb", ".c", ".h",
              ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".go", ".rs", ".js", ".ts", ".jsx", ".tsx", ".sh", ".rb",
              ".pl", ".php", ".swift", ".scala", ".hs", ".ml", ".jl", ".r", ".lua", ".sql", ".toml", ".yaml", ".yml",
              *text_files.JSON_LINES)  # fmt: skip
TAKES = (
    "data takes auto, tiny_shakespeare, builtin, tfds:NAME, a text file, a folder or a glob of them, .jsonl, .gz or "
    ".zst, .bin or .npy token files, an index of TFRecords (.index), a folder made by `data prepare`, or several with "
    "weights: a.bin=3,b.bin=1; files and folders may be in a bucket: gs://BUCKET/..."
)


@dataclasses.dataclass(frozen=True)
class OpenedSource:
    """A source under a vocabulary."""

    name: str
    fingerprint: str
    splits: dict[str, Split]
    through_tf: bool = False


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    field: str = "text"
    share: float | None = None  # of validation, and as much for test; None: 5%, of large sources less
    named_validation: bool = False  # then all of a source is for training

    def share_of(self, size: int) -> float:
        if self.named_validation:
            return 0.0
        return min(SHARE, MAX_HELD_OUT / max(size, 1)) if self.share is None else self.share


class Texts:
    """A text of three splits in memory: tiny_shakespeare, the built-in corpus, one text file."""

    vocabulary = None

    def __init__(self, name: str, texts: tuple[str, str, str], own_splits: bool = True):
        self.name, self.texts, self.own_splits = name, texts, own_splits

    def sample(self) -> Iterator[str]:
        """The text that a tokenizer is trained on."""
        return iter(text_files.cut_text(self.texts[0]))

    def characters(self) -> set[str]:
        return set().union(*map(set, self.texts))

    def characters_of_train(self) -> set[str]:
        return set(self.texts[0])

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        names = [f"{split} split of {self.name}" for split in SPLITS]
        ids = [vocabulary.encode(text, name) for text, name in zip(self.texts, names, strict=True)]
        splits = {split: Split.of_ids(found, self.name) for split, found in zip(SPLITS, ids, strict=True) if len(found)}
        return OpenedSource(self.name, _fingerprint_texts(self.texts), splits, through_tf=True)


class TextFiles:
    """Texts that are tokenised once, into the cache, and memory-mapped from there."""

    vocabulary = None
    own_splits = False

    def __init__(self, recipe: Recipe):
        self.recipe, self.name = recipe, recipe.name

    def pieces(self) -> Iterator[text_files.Piece]:
        for item in self.recipe.items():
            yield from item.pieces(self.recipe.field)

    def sample(self, most: int = 64 << 20) -> Iterator[str]:
        """At most about 64 MB of the text, from all over it."""
        size = sum(path.stat().st_size for path in self.recipe.files)
        for number, piece in enumerate(self.pieces()):
            if size <= most or hashlib.sha256(str(number).encode()).digest()[0] * size < 256 * most:
                yield piece.prompt + piece.text

    def characters(self) -> set[str]:
        found, ascii_counts = set(), np.zeros(128, np.int64)
        for piece in self.pieces():
            for text in (piece.prompt, piece.text):
                if text.isascii():  # by far the most, and counted 30 times faster than by a set
                    ascii_counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=128)
                else:
                    found.update(text)
        return found | set(map(chr, np.flatnonzero(ascii_counts)))

    characters_of_train = characters

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        key = hashlib.sha256((self.recipe.identity() + vocabulary.sha256).encode()).hexdigest()[:16]
        folder = cache_folder() / f"{Path(self.name).stem[:40] or 'text'}-{key}"
        found = TokenFolder.open(folder) if folder.exists() else prepare(self.recipe, vocabulary, folder, progress)
        return OpenedSource(self.name, found.fingerprint, found.splits())


class PreparedFolder:
    own_splits = True  # whatever share is asked for

    def __init__(self, path: Path):
        self.folder, self.name = TokenFolder.open(path), str(path.resolve())
        self.vocabulary = self.folder.vocabulary

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        if vocabulary.sha256 != self.vocabulary.sha256:
            raise UsageError(
                f"data={self.name} was prepared with tokenizer={self.vocabulary.name} ({self.vocabulary.sha256[:12]}), "
                f"and this takes {vocabulary.name} ({vocabulary.sha256[:12]}); prepare it again with that, or leave "
                "tokenizer= out"
            )
        return OpenedSource(self.name, self.folder.fingerprint, self.folder.splits())


class TokenFile:
    """nanoGPT's .bin or a .npy; without a tokenizer it has numbers for tokens."""

    vocabulary = None
    own_splits = False

    def __init__(self, path: Path, options: SourceOptions):
        self.path, self.name, self.options = path, str(path.resolve()), options
        self.tokens = open_token_file(path)

    def largest_id(self) -> int:
        return find_largest_id(self.tokens)

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        if self.path.stat().st_size <= LARGE and (largest := self.largest_id()) >= len(vocabulary):
            raise UsageError(describe_largest_id(self.name, largest, len(vocabulary)))
        return OpenedSource(self.name, fingerprint_file(self.path), self._cut())

    def _cut(self) -> dict[str, Split]:
        size = len(self.tokens)
        share = self.options.share_of(size)
        borders = [0, int(size * (1 - 2 * share)), int(size * (1 - share)), size]
        return {split: Split(self.tokens.cut(*span)) for split, span in name_spans(borders).items()}


class TFRecordFiles:
    """GPT-J's TFRecords, through their index file."""

    vocabulary = None
    own_splits = False

    def __init__(self, path: Path, options: SourceOptions, place: BucketPath | None, say: Say):
        self.path, self.name, self.options = path, str(path.resolve()), options
        self.records = tfrecords.Records.open(path, cache_folder(), place, say)

    def largest_id(self) -> int:
        return self.records.largest_id()

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        share = self.options.share_of(self.records.size)
        return OpenedSource(self.name, self.records.fingerprint, self.records.splits(share), through_tf=True)


Source = Texts | TextFiles | PreparedFolder | TokenFile | TFRecordFiles


def find_source(name: str, options: SourceOptions, say: Say) -> Source:
    """What a name stands for."""
    if is_url(name):
        return _find_in_bucket(location(name), options, say)
    if name == "auto":
        return _find_shakespeare_or_builtin(say)
    if name == "tiny_shakespeare":
        return Texts(name, shakespeare.load_splits())
    if name == "builtin":
        return Texts(name, _split_text(builtin.text(), SHARE))
    if name.startswith("tfds:"):
        return Texts(name, shakespeare.load_tfds_texts(name.removeprefix("tfds:"), options.field))
    path = Path(os.path.expanduser(name))
    return _find_files(name, path, options, say)


def _find_in_bucket(place: BucketPath, options: SourceOptions, say: Say) -> Source:
    """From a copy on this machine's disk, under the name that it has in the bucket."""
    if set("*?[") & set(place.key):
        raise UsageError(f"data={place}: patterns are not looked up in a bucket; name a file or a folder there")
    path = copy_to_disk(place, say, check_copy)
    source = _find_files(str(place), path, options, say, place)
    source.name = str(place)
    return source


def check_copy(path: Path) -> None:
    """A prepared folder says what its files must be."""
    if TokenFolder.is_folder(path):
        TokenFolder.open(path).check_contents()


def _find_files(name: str, path: Path, options: SourceOptions, say: Say, place: BucketPath | None = None) -> Source:
    """What a path stands for; `place` is what it is a copy of."""
    if path.is_dir() and TokenFolder.is_folder(path):
        return PreparedFolder(path)
    if path.suffix in TOKEN_FILES and path.is_file():
        return TokenFile(path, options)
    if path.suffix in (".index", *tfrecords.SUFFIXES) and path.is_file():
        return TFRecordFiles(path, options, place, say)
    return _find_texts(name, path, options, say)


def find_recipe(names: list[str], options: SourceOptions, say: Say = print) -> Recipe:
    """The text files that several names stand for, as one corpus."""
    files = [file for name in names for file in _list_files(name, local_path(name, say))]
    files = [file.resolve() for file in files]
    if again := next((file for file in files if files.count(file) > 1), None):
        raise UsageError(f"{again} is named twice; name every file once")
    name = ",".join(name if is_url(name) else str(Path(os.path.expanduser(name)).resolve()) for name in names)
    one_text = len(files) == 1 and text_files.FileRange(files[0], 0, 0, True).is_plain
    share = options.share_of(sum(file.stat().st_size for file in files))
    return Recipe(name, tuple(files), options.field, share, in_order=one_text)


def _find_texts(name: str, path: Path, options: SourceOptions, say: Say) -> Source:
    recipe = find_recipe([name], options, say)
    if not recipe.in_order or recipe.files[0].stat().st_size > IN_MEMORY:
        return TextFiles(recipe)
    splits = _split_text(text_files.read_text(recipe.files[0]), recipe.share)
    if min(len(text) for text, wanted in zip(splits, (1, recipe.share, recipe.share), strict=True) if wanted) < 2:
        length = sum(map(len, splits))
        raise UsageError(
            f"data={path} is {f'too short ({length} characters)' if length else 'empty'}: its 90/5/5 split "
            "needs two characters in each part; give a longer text"
        )
    return Texts(str(path.resolve()), splits, own_splits=False)


def _list_files(name: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file.relative_to(path)))
        if not found:
            raise UsageError(f"data={name} is a folder without text files ({', '.join(TEXT_FILES[:8])}, ...); {TAKES}")
        return found
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    found = [file for file in found if file.is_file()]
    if not found:
        raise UsageError(f"data={name}: there is no such file; {TAKES}")
    return found


def _is_text(path: Path) -> bool:
    if any(part.startswith((".", "__pycache__")) for part in path.parts):
        return False
    return (path.with_suffix("") if path.suffix in text_files.PACKED else path).suffix.lower() in TEXT_FILES


def _find_shakespeare_or_builtin(say: Say) -> Source:
    try:
        return Texts("tiny_shakespeare", shakespeare.load_splits())
    except UsageError as reason:
        say(f"Training on the built-in corpus: the numbers are then not Shakespeare's.\n{reason}")
        return Texts("builtin", _split_text(builtin.text(), SHARE))


def _split_text(text: str, share: float) -> tuple[str, str, str]:
    """Train, validation and test, in that order: with 90/5/5 as TFDS splits tiny_shakespeare."""
    train_end = int(len(text) * (1 - 2 * share))
    validation_end = train_end + int((len(text) - train_end) * 0.5)
    return text[:train_end], text[train_end:validation_end], text[validation_end:]


def _fingerprint_texts(texts: tuple[str, str, str]) -> str:
    """A sha256 of the three splits: equal exactly where the text is."""
    lengths = ",".join(str(len(text)) for text in texts)
    return hashlib.sha256((lengths + "".join(texts)).encode()).hexdigest()
