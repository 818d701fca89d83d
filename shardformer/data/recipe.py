"""The documents and token files of a corpus, their division into items of work, and the split of each document."""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardformer.data import text_cuts, text_files
from shardformer.data.chat.chat_files import read_conversations
from shardformer.data.chat.chat_format import ChatFormat, resolve_format
from shardformer.data.chat.preferences import read_pairs
from shardformer.data.digests import Stamp, digest_files, stamp_file
from shardformer.data.row_report import RowReport
from shardformer.data.text_cuts import LINE_BREAKS, Breaks
from shardformer.data.text_files import FileRange, Piece
from shardformer.data.token_folder import FORMAT
from shardformer.data.tokens import SPLITS, divide_in_order, open_token_file
from shardformer.data.vocabulary import Vocabulary
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.data.removal import Removal

HASHED = 10_000  # characters of a document, normalised, by which its split is chosen
MAX_NAMED = 8  # files in one message
READ_FOR_HASH = 20_000  # characters that are normalised for it


@dataclasses.dataclass(frozen=True)
class Item:
    """The text that one thread tokenises into one part; if `split` is None, each document's hash chooses it."""

    ranges: tuple[FileRange, ...]
    split: str | None = None

    @property
    def bytes(self) -> int:
        return sum(part.end - part.start for part in self.ranges)

    @property
    def starts_a_document(self) -> bool:
        """Returns whether the item does not continue the text of another one."""
        return self.ranges[0].start == 0

    @property
    def is_part_of_a_long_text(self) -> bool:
        """Returns whether the item is one plain file of more than `LIMITS.range` bytes, or a part of one."""
        first = self.ranges[0]
        is_part = first.start > 0 or not first.ends
        is_long = first.is_plain and first.end > text_cuts.LIMITS.range + text_cuts.LIMITS.look_ahead
        return len(self.ranges) == 1 and (is_part or is_long)


@dataclasses.dataclass(frozen=True)
class TokenItem:
    """The ids of a token file that one thread copies into one part."""

    path: Path
    start: int
    end: int
    split: str
    ends: bool  # whether the file's part of the split ends here

    @property
    def bytes(self) -> int:
        return 2 * (self.end - self.start)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The documents and token files of a corpus, and how they are divided into splits."""

    name: str
    files: tuple[Path, ...]
    field: str = "text"
    share: float = 0.05  # of the documents for validation, and as many for test
    in_order: bool = False  # one long text, whose end is validation and test
    token_files: tuple[Path, ...] = ()  # each is divided in order
    chat: str = ""  # the chat template of files of conversations, by name; auto: the tokenizer's
    skips_bad_rows: bool = False  # leaves out rows that cannot be trained on
    pairs: bool = False  # the documents are the sides of preference pairs, of conversations or of texts
    removal: "Removal | None" = None  # documents that are left out

    @property
    def every_file(self) -> tuple[Path, ...]:
        return self.files + self.token_files

    @property
    def has_masks(self) -> bool:
        """Returns whether each document has a mask of the tokens with a loss."""
        return bool(self.chat) or self.pairs

    @property
    def has_documents(self) -> bool:
        """Returns whether documents end within a split; one text or token file in order is one document."""
        return not self.in_order and bool(self.files or len(self.token_files) > 1)

    def items(self, breaks: Breaks = LINE_BREAKS) -> list[Item]:
        """Divides the files into items of about `LIMITS.range` bytes; a text may be cut at `breaks`."""
        sizes = {path: path.stat().st_size for path in self.files}
        if self.in_order:
            return _divide_in_order(self.files[0], sizes[self.files[0]], self.share, breaks)
        items: list[Item] = []
        group: list[FileRange] = []
        for path, size in sizes.items():
            file = FileRange(path, 0, size, True)
            ranges = [file]
            if file.is_plain:
                ranges = text_files.divide_file(path, size, breaks)
            if len(ranges) > 1:
                items += [Item((part,)) for part in ranges]
                continue
            if group and sum(part.end - part.start for part in group) + size > text_cuts.LIMITS.range:
                items.append(Item(tuple(group)))
                group = []
            group += ranges
        return items + ([Item(tuple(group))] if group else [])

    def token_items(self) -> list[TokenItem]:
        """Divides the token files into items of `LIMITS.ids` ids."""
        items: list[TokenItem] = []
        for path in self.token_files:
            for split, (start, end) in divide_in_order(len(open_token_file(path)), self.share).items():
                borders = [*range(start, end, text_cuts.LIMITS.ids), end]
                items += [TokenItem(path, a, b, split, b == end) for a, b in itertools.pairwise(borders)]
        return items

    def identity(self) -> str:
        """Returns a sha256 of the names, the contents and the options."""
        options: list[object] = [self.field, self.share, self.in_order]
        # Only if given: folders of earlier versions keep their names.
        options += ["skips_bad_rows"] if self.skips_bad_rows else []
        # Earlier versions trained on these files differently, and their folders may be in the cache.
        options += ["chat 2"] if self.chat else []
        options += ["pairs"] if self.pairs else []
        options += [["removal", self.removal.identity]] if self.removal else []
        options += ["json records"] if any(self._contains_json_records(path) for path in self.files) else []
        digests = digest_files(self.every_file)
        files = [(str(path), digest) for path, digest in zip(self.every_file, digests, strict=True)]
        return hashlib.sha256(json.dumps([FORMAT, files, options]).encode()).hexdigest()

    def _contains_json_records(self, path: Path) -> bool:
        return text_files.is_json(path) and text_files.contains_records(path)

    def stamps(self) -> list[Stamp]:
        """Returns values that change with any of the files."""
        return [stamp_file(path) for path in self.every_file]

    def identify_with(self, vocabulary: Vocabulary) -> str:
        """Returns a sha256 of what these documents become with this vocabulary."""
        format = self.choose_format(vocabulary).identity if self.chat else ""
        # Earlier versions read special tokens in messages as their ids, and their folders may be in the cache.
        format += "letters" if self.chat and vocabulary.letters else ""
        return hashlib.sha256((self.identity() + vocabulary.sha256 + format).encode()).hexdigest()

    def choose_format(self, vocabulary: Vocabulary | None = None) -> ChatFormat:
        """Returns the chat template: that of a vocabulary, if it is known yet."""
        if vocabulary is None:
            return resolve_format(self.chat, None, "chars or bpe:N")
        return resolve_format(self.chat, vocabulary.chat, vocabulary.name)

    def choose_split(self, item: Item, first: Piece) -> str:
        """Returns the split of a document of which `first` is the first piece; long documents are for training."""
        if item.split:
            return item.split
        if item.is_part_of_a_long_text:
            return "train"
        is_chat = first.spans is not None or self.pairs
        return split_of_text(first.key if is_chat else first.prompt + first.text, self.share)

    def check_encoding(self) -> None:
        """Raises UsageError that names every plain file that is not UTF-8, before any of them is tokenised."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            plain = [path for path in self.files if FileRange(path, 0, 0, True).is_plain]
            wrong = [path for path, fine in zip(plain, pool.map(text_files.is_utf8, plain), strict=True) if not fine]
        if len(wrong) > 1 or (wrong and len(self.files) > 1):
            named = ", ".join(map(str, wrong[:MAX_NAMED])) + (", ..." if len(wrong) > MAX_NAMED else "")
            raise UsageError(
                f"{len(wrong):,} of {len(self.files):,} files are not UTF-8: {named}; convert them, for example with "
                "iconv, or name the others only"
            )

    def pieces(self, *splits: str) -> Iterator[Piece]:
        """Yields the text of all documents of these splits; raises UsageError for rows that cannot be trained on."""
        report = RowReport()
        for item in self.items():
            starts, split = True, ""
            for part in item.ranges:
                for piece in self._read_pieces(part, report):
                    split = self.choose_split(item, piece) if starts else split
                    starts = piece.ends
                    if split in splits:
                        yield piece
        if not self.skips_bad_rows:
            report.raise_faults()

    def _read_pieces(self, part: FileRange, report: RowReport) -> Iterator[Piece]:
        if self.pairs:
            format = self.choose_format() if self.chat else None
            return (side for pair in read_pairs(part.path, format, report=report) for side in pair)
        if self.chat:
            return read_conversations(part.path, self.choose_format(), report=report)
        return self.read_texts(part, report=report)

    def read_texts(
        self,
        part: FileRange,
        breaks: Breaks = LINE_BREAKS,
        advance: Callable[[int], object] = lambda _: None,
        report: RowReport | None = None,
    ) -> Iterator[Piece]:
        """Yields the text of a range, without documents that are left out; see `text_files.read_pieces`."""
        pieces = text_files.read_pieces(part, self.field, breaks, advance, report)
        return self.removal.retain(part, pieces) if self.removal else pieces


def split_of_text(text: str, share: float) -> str:
    """Returns the split that a hash of a document's beginning chooses."""
    digest = hashlib.sha256(normalise(text).encode("utf-8", "surrogatepass")).digest()
    chance = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if chance < share else "test" if chance < 2 * share else "train"


def normalise(text: str) -> str:
    """Returns the words at the start of a text in lower case, so that near-copies of it are equal."""
    words = " ".join(re.findall(r"\w+", text[:READ_FOR_HASH].casefold()))
    return words[:HASHED] or text[:READ_FOR_HASH].strip()


def _divide_in_order(path: Path, size: int, share: float, breaks: Breaks) -> list[Item]:
    """The text's last shares are validation and test."""
    with open(path, "rb") as file:
        borders = [text_files.find_break(file, int(size * (1 - n * share)), size, breaks or LINE_BREAKS) if share
                   else size for n in (2, 1)]  # fmt: skip
    items = []
    for split, (start, end) in zip(SPLITS, itertools.pairwise((0, *borders, size)), strict=True):
        ranges = text_files.divide_file(path, end, breaks, start)
        items += [Item((part,), split) for part in ranges if part.start < part.end]
    return items
