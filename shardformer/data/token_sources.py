"""Sources of token ids: a prepared folder, a .bin or .npy file, TFRecords."""

from pathlib import Path

from shardformer.data import tfrecords
from shardformer.data.prepare import Progress
from shardformer.data.source import OpenedSource, Say, Source, SourceOptions
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
from shardformer.errors import UsageError
from shardformer.storage import BucketPath, cache_folder

LARGE = 1 << 28  # bytes of a token file whose ids are not all read before training


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

    def __init__(self, path: Path, options: SourceOptions, place: BucketPath | None, say: Say):
        self.path, self.name, self.options = path, str(path.resolve()), options
        self.records = tfrecords.Records.open(path, cache_folder(), place, say)

    def largest_id(self) -> int:
        return self.records.largest_id()

    def open(self, vocabulary: Vocabulary, progress: Progress) -> OpenedSource:
        share = self.options.share_of(self.records.size)
        return OpenedSource(self.name, self.records.fingerprint, self.records.splits(share), through_tf=True)
