"""The sources of paths: texts that are tokenised into the cache, prepared folders, token files and TFRecords."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardformer.data import text_cuts, text_files, tfrecords
from shardformer.data.chat.chat_files import are_chat_files
from shardformer.data.chat.preferences import are_preference_files, holds_messages
from shardformer.data.listing import TOKEN_FILES, check_suffix, is_code, list_files
from shardformer.data.prepare import prepare
from shardformer.data.recipe import Recipe
from shardformer.data.source import SHARE, TAKES, OpenedSource, Progress, Source, SourceOptions, Texts, split_text
from shardformer.data.token_folder import TokenFolder
from shardformer.data.tokens import (
    describe_largest_id,
    divide_in_order,
    find_largest_id,
    fingerprint_file,
    open_token_file,
)
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import Split
from shardformer.errors import RunError, UsageError
from shardformer.files import expand_home, make_folder
from shardformer.messages import log
from shardformer.storage import BucketPath, cache_folder, is_url, local_path
from shardformer.storage.local_copy import copy_to_disk

SAMPLED = 64 << 20  # bytes of text that a tokenizer is trained on
LARGE = 1 << 28  # bytes of a token file whose ids are not all read before training


class TextFiles(Source):
    """Documents that are tokenised once, into the cache, and memory-mapped from there."""

    is_text = True

    def __init__(self, recipe: Recipe):
        self.recipe, self.name, self.is_chat = recipe, recipe.name, bool(recipe.chat)
        self._is_checked = False

    def with_share(self, share: float) -> "TextFiles":
        larger = max(share, self.recipe.share) if self.recipe.share >= SHARE else self.recipe.share
        return TextFiles(dataclasses.replace(self.recipe, share=larger))

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


class PreparedFolder(Source):
    """A folder of `data prepare`."""

    fixed_splits = True

    def __init__(self, path: Path):
        self.folder, self.name = TokenFolder.open(path), str(path.resolve())
        self.vocabulary: Vocabulary = self.folder.vocabulary
        self.has_chat = self.folder.has_chat

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        if vocabulary.sha256 != self.vocabulary.sha256:
            raise UsageError(
                f"data={self.name} was prepared with tokenizer={self.vocabulary.name} ({self.vocabulary.sha256[:12]}), "
                f"and this takes {vocabulary.name} ({vocabulary.sha256[:12]}); prepare it again with that, or leave "
                "tokenizer= out"
            )
        result = self.folder
        return OpenedSource(self.name, result.fingerprint, result.splits(), check=result.check_contents)


class TokenFile(Source):
    """nanoGPT's .bin or a .npy; without a tokenizer its tokens are integers."""

    def __init__(self, path: Path, options: SourceOptions):
        self.path, self.name, self.options = path, str(path.resolve()), options
        self.tokens = open_token_file(path)

    def largest_id(self) -> int:
        return find_largest_id(self.tokens)

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        if self.path.stat().st_size <= LARGE and (largest := self.largest_id()) >= len(vocabulary):
            raise UsageError(describe_largest_id(self.name, largest, len(vocabulary)))
        return OpenedSource(self.name, fingerprint_file(self.path), self._split())

    def _split(self) -> dict[str, Split]:
        size = len(self.tokens)
        spans = divide_in_order(size, self.options.share_of(size))
        return {split: Split(self.tokens.cut(*span)) for split, span in spans.items()}


class TFRecordFiles(Source):
    """GPT-J's TFRecords, through their index file."""

    def __init__(self, path: Path, options: SourceOptions, place: BucketPath | None):
        self.path, self.name, self.options = path, str(path.resolve()), options
        self.records = tfrecords.Records.open(path, cache_folder(), place)

    def largest_id(self) -> int:
        return self.records.largest_id()

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        share = self.options.share_of(self.records.size)
        return OpenedSource(self.name, self.records.fingerprint, self.records.splits(share), through_tf=True)


def find_in_bucket(origin: BucketPath, options: SourceOptions) -> Source:
    """Returns the source of a copy on this machine's disk, under its name in the bucket."""
    if set("*?[") & set(origin.key):
        raise UsageError(f"data={origin}: patterns are not looked up in a bucket; name a file or a folder there")
    path = copy_to_disk(origin, check_copy)
    source = find_files(str(origin), path, options, origin)
    source.name = str(origin)
    return source


def check_copy(path: Path) -> None:
    """Raises RunError if the copy of a prepared folder differs from its index."""
    if TokenFolder.is_folder(path):
        TokenFolder.open(path).check_contents()


def find_files(name: str, path: Path, options: SourceOptions, origin: BucketPath | None = None) -> Source:
    """Returns the source of a path; `origin` is the location in a bucket that it is a copy of."""
    if path.is_dir() and TokenFolder.is_folder(path):
        return PreparedFolder(path)
    if path.suffix in TOKEN_FILES and path.is_file():
        return TokenFile(path, options)
    if path.suffix in (".index", *tfrecords.SUFFIXES) and path.is_file():
        return TFRecordFiles(path, options, origin)
    return _find_texts(name, path, options)


def find_recipe(names: list[str], options: SourceOptions, *, with_ids: bool = False) -> Recipe:
    """Returns the text files of the given names as one corpus; with_ids=True accepts token files among them."""
    files: list[Path] = []
    for name in names:
        files += list_files(name, local_path(name), options.out, TAKES)
    files = [file.resolve() for file in files]
    if repeated := _find_repeated(files):
        raise UsageError(f"{repeated} is named twice; name every file once")
    token_files = [file for file in files if with_ids and file.suffix in TOKEN_FILES]
    text_paths = [file for file in files if file not in token_files]
    for file in text_paths:
        check_suffix(file)
        if text_files.is_json(file) or not is_code(file):
            text_files.check_not_records(file)
    name = ",".join(name if is_url(name) else str(Path(expand_home(name)).resolve()) for name in names)
    if tables := [file for file in text_paths if file.suffix.lower() == ".csv"]:
        log.info(
            f"data={name}: {len(tables):,} .csv read as text, with its header, commas and quotes; to train on its "
            "columns as records, write them to .jsonl or .parquet"
        )
    one_text = len(files) == 1 and bool(text_paths) and text_files.FileRange(text_paths[0], 0, 0, True).is_plain
    size = sum(file.stat().st_size for file in text_paths) + sum(len(open_token_file(file)) for file in token_files)
    is_chat = not options.pairs and are_chat_files(text_paths, options.field)
    pairs = not is_chat and are_preference_files(text_paths, options.field)
    if options.pairs and not pairs and are_chat_files(text_paths, options.field):
        raise UsageError(
            f"data={name} holds conversations, expected preference pairs; give records with prompt, chosen and "
            "rejected, or read conversations: objective=lm, without pairs=true"
        )
    if pairs:
        is_chat = holds_messages(text_files.peek_record(text_paths[0]))
    return Recipe(
        name,
        tuple(text_paths),
        options.field,
        options.share_of(size),
        in_order=one_text,
        token_files=tuple(token_files),
        chat=options.chat_template if is_chat else "",
        skips_bad_rows=options.skips_bad_rows,
        pairs=pairs,
    )


def _find_repeated(files: list[Path]) -> Path | None:
    seen: set[Path] = set()
    for file in files:
        if file in seen:
            return file
        seen.add(file)
    return None


def _find_texts(name: str, path: Path, options: SourceOptions) -> Source:
    recipe = find_recipe([name], options)
    if recipe.has_masks or not recipe.in_order or recipe.files[0].stat().st_size > text_cuts.LIMITS.in_memory:
        return TextFiles(recipe)
    splits = split_text(text_files.read_text(recipe.files[0]), recipe.share)
    if min(len(text) for text, wanted in zip(splits, (1, recipe.share, recipe.share), strict=True) if wanted) < 2:
        length = sum(map(len, splits))
        raise UsageError(
            f"data={path} is {f'too short ({length} characters)' if length else 'empty'}: its 90/5/5 split "
            "needs two characters in each part; give a longer text"
        )
    return Texts(str(path.resolve()), splits, fixed_splits=False)
