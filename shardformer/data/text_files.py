"""Files of text as streams of documents in pieces: plain text, .jsonl and .json, packed or not."""

import codecs
import dataclasses
import functools
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from shardformer.data import json_records, text_cuts
from shardformer.data.packed_files import PACKED, find_suffix, open_unpacked
from shardformer.data.row_report import RowError, RowReport
from shardformer.data.table_files import is_table, read_table
from shardformer.data.text_cuts import LINE_BREAKS, Breaks, cut_text
from shardformer.errors import UsageError
from shardformer.files import open_regular

JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text of one document; the last piece of it ends it."""

    text: str
    ends: bool = True
    prompt: str = ""  # text before it without a loss
    spans: tuple[tuple[int, int], ...] | None = None  # of a conversation: the characters with a loss
    key: str = ""  # the text that chooses its split, if not this one


Pieces = TypeVar("Pieces", bound=tuple[Piece, ...])


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A part of a plain text file, or a complete .jsonl, .json or packed file."""

    path: Path
    start: int
    end: int
    ends: bool  # whether the document ends here

    @property
    def contains_records(self) -> bool:
        return contains_records(self.path)

    @property
    def is_plain(self) -> bool:
        return not self.contains_records and self.path.suffix not in PACKED


def contains_records(path: Path) -> bool:
    """Returns whether a file has a document in each line, row or element of an array."""
    if is_json_lines(path) or is_table(path):
        return True
    return is_json(path) and _starts_with_records(path, *_stamp(path))


def is_json_lines(path: Path) -> bool:
    return find_suffix(path) in JSON_LINES


def is_json(path: Path) -> bool:
    return find_suffix(path) == JSON


def check_not_records(path: Path) -> None:
    """Raises UsageError for records of JSON under another suffix: as plain text, they would teach JSON."""
    if contains_records(path):
        return
    beginning = _read_beginning(path)
    if json_records.contains_records(beginning):
        raise UsageError(
            f"data={path} holds records of JSON, an array or a line for each; name it .json or .jsonl to learn its "
            "records; to learn the characters of JSON, make them the text of a record"
        )
    if json_records.wraps_records(beginning):
        raise UsageError(
            f"data={path} holds records inside of another object or array of JSON; write them as one array, or each on "
            "a line of a .jsonl file; to learn the characters, make them the text of a record"
        )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        result = path.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return result.st_size, result.st_mtime_ns


@functools.lru_cache(1 << 12)
def _starts_with_records(path: Path, size: int, time: int) -> bool:
    beginning = _read_beginning(path)
    return json_records.contains_array(beginning) or json_records.contains_records(beginning)


def _read_beginning(path: Path) -> str:
    """Returns the first characters of a file; an unreadable one is an error where it is read."""
    try:
        with open_unpacked(path, lambda _: None) as file:
            return file.read(json_records.SNIFFED).decode("utf-8", "replace")
    except (EOFError, OSError, zlib.error):
        return ""


def read_pieces(
    part: FileRange,
    field: str,
    breaks: Breaks = LINE_BREAKS,
    advance: Callable[[int], object] = lambda _: None,
    report: RowReport | None = None,
) -> Iterator[Piece]:
    """Yields all text of a range, documents in order.

    `field` names the text in records. A document may be cut at `breaks`. `advance` is called with the number of bytes
    that were read since its last call. A record without a text goes into `report`, or raises if there is none.
    """
    try:
        if part.contains_records:
            yield from _read_records(part.path, field, breaks, advance, report)
        elif part.path.suffix in PACKED:
            yield from _read_packed_text(part.path, breaks, advance)
        else:
            content = _read_range(part)
            yield from _cut(_decode(part.path, content, part.start), part.ends, breaks, part.path)
            advance(len(content))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{part.path} is truncated or not packed by gzip: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {part.path}: {error.strerror or error}") from None


def divide_file(path: Path, size: int, breaks: Breaks = LINE_BREAKS, start: int = 0) -> list[FileRange]:
    """Divides a plain text file from `start` to `size` into ranges of `LIMITS.range` bytes; without breaks into one."""
    borders = [start]
    with open(path, "rb") as file:
        while breaks and size - borders[-1] > text_cuts.LIMITS.range + text_cuts.LIMITS.look_ahead:
            borders.append(find_break(file, borders[-1] + text_cuts.LIMITS.range, size, breaks))
    borders.append(size)
    pairs = itertools.pairwise(borders)
    return [FileRange(path, a, b, b == size) for a, b in pairs if a < b or size == start]


def find_break(file: BinaryIO, position: int, size: int, breaks: Breaks = LINE_BREAKS) -> int:
    """Returns the first offset from `position` on where the bytes of a text may be cut."""
    first = max(position - 1, 0)
    file.seek(first)
    ahead = file.read(text_cuts.LIMITS.look_ahead)
    for kind in breaks:
        if result := kind.find(ahead):
            return min(first + result, size)
    offset = ahead.find(b"\n", 1) + 1 or 1  # else at any line break, else between characters
    while offset < len(ahead) and ahead[offset] & 0xC0 == 0x80:
        offset += 1
    return min(first + offset, size)


def _cut(text: str, ends: bool, breaks: Breaks, path: Path) -> Iterator[Piece]:
    if not breaks:
        check_uncut(path, len(text))
    *pieces, last = cut_text(text, breaks)
    yield from (Piece(piece, ends=False) for piece in pieces)
    yield Piece(last, ends)


def check_uncut(path: Path, length: int) -> None:
    """Raises if a document is too long for a tokenizer that reads every document as one piece."""
    if length > text_cuts.LIMITS.uncut:
        raise UsageError(
            f"{path} holds a document of more than {text_cuts.LIMITS.uncut:,} characters, and this tokenizer reads a "
            "document as one piece; divide it into documents (.jsonl), or take another tokenizer"
        )


def read_text(path: Path) -> str:
    """Returns the text of a file."""
    try:
        return _decode(path, path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read data={path}: {error.strerror}") from None


def is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with open_regular(path) as file:
            while content := file.read(text_cuts.LIMITS.look_ahead):
                decoder.decode(content)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return True


def _read_range(part: FileRange) -> bytes:
    with open(part.path, "rb") as file:
        file.seek(part.start)
        content = file.read(part.end - part.start)
    if len(content) != part.end - part.start:
        raise UsageError(f"{part.path} has become shorter while it was read; start again")
    return content


def _decode(path: Path, content: bytes, start: int = 0) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: {error.reason} (0x{content[error.start]:02X}) at byte {start + error.start}; "
            "convert it, for example with iconv"
        ) from None


def _read_packed_text(path: Path, breaks: Breaks, advance: Callable[[int], object]) -> Iterator[Piece]:
    decoder, waiting = codecs.getincrementaldecoder("utf-8")(), ""
    with open_unpacked(path, advance) as file:
        for content in itertools.chain(iter(lambda: file.read(text_cuts.LIMITS.look_ahead), b""), [b""]):
            try:
                waiting += decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                raise UsageError(f"{path} is not UTF-8: {error.reason}; convert it, for example with iconv") from None
            if not breaks:
                check_uncut(path, len(waiting))
                continue
            *pieces, waiting = cut_text(waiting, breaks)
            if len(waiting) > text_cuts.LIMITS.waiting:  # a word of megabytes, or a run of line breaks
                if len(set(waiting)) == 1:
                    raise UsageError(
                        f"{path} repeats {waiting[0]!r} more than {text_cuts.LIMITS.waiting:,} times: this is not text"
                    )
                end = waiting.rfind("\n") + 1 or len(waiting)
                pieces, waiting = [*pieces, waiting[:end]], waiting[end:]
            yield from (Piece(piece, ends=False) for piece in pieces)
    yield Piece(waiting)


def read_lines(path: Path, advance: Callable[[int], object] = lambda _: None) -> Iterator[tuple[bytes, str]]:
    """Yields each line of a file that is not empty, element of an array or row of a table, with its name in errors."""
    if is_table(path):
        yield from read_table(path, advance)
        return
    is_array = is_json(path) and json_records.contains_array(_read_beginning(path))
    try:
        with open_unpacked(path, advance) as file:
            if is_array:
                yield from json_records.read_array(file, str(path), text_cuts.LIMITS.line)
                return
            number = last = 0
            while line := file.readline(text_cuts.LIMITS.line):
                number += 1
                if not line.strip() and number - last > text_cuts.LIMITS.empty_lines:
                    raise UsageError(
                        f"{path} has more than {text_cuts.LIMITS.empty_lines:,} empty lines in a row: "
                        "these are no records"
                    )
                if len(line) == text_cuts.LIMITS.line:
                    raise UsageError(
                        f"{path}, line {number}, has more than {text_cuts.LIMITS.line:,} bytes; cut it into documents"
                    )
                if line.strip():
                    last = number
                    yield line, f"{path}, line {number}"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is truncated or not packed by gzip: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def read_rows(
    path: Path,
    make: Callable[[Any, str], Pieces],
    advance: Callable[[int], object] = lambda _: None,
    report: RowReport | None = None,
) -> Iterator[Pieces]:
    """Yields the pieces that `make` returns for each record of a file and the record's name in errors.

    A record that is not JSON, of which `make` raises RowError, or whose text UTF-8 lacks, goes into `report`, or raises
    without one.
    """
    for line, location in read_lines(path, advance):
        try:
            pieces = make(_parse(line, location), location)
            _check_characters(pieces, location)
        except RowError as error:
            if report is None:
                raise
            report.add_fault(error)
        else:
            yield pieces


def _parse(line: bytes, location: str):
    try:
        text = line.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:  # json would guess UTF-16, whose lines cannot be split at a byte
        cause = "is not UTF-8"
        raise RowError(location, f"{cause}: {error.reason}; convert it, for example with iconv", cause) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(location, f"is not JSON: {error}", "is not JSON") from None


def _check_characters(pieces: tuple[Piece, ...], location: str) -> None:
    """Raises RowError for half of a character, which JSON can escape and most tokenizers do not take."""
    for text in (text for piece in pieces for text in (piece.prompt, piece.text)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            cause = "half of a character (a lone surrogate)"
            raise RowError(location, f"has {text[error.start]!r}, {cause}; remove it", cause) from None


def peek_record(path: Path):
    """Returns the first record of a file; None if there is none or it is not JSON."""
    line = next((line for line, _ in read_lines(path)), b"")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_records(
    path: Path, field: str, breaks: Breaks, advance: Callable[[int], object], report: RowReport | None
) -> Iterator[Piece]:
    for (piece,) in read_rows(path, functools.partial(_make_piece, field), advance, report):
        first, *rest = _cut(piece.text, True, breaks, path)
        yield dataclasses.replace(first, prompt=piece.prompt)
        yield from rest


def _make_piece(field: str, record, location: str) -> tuple[Piece]:
    """Returns the text of a record behind its prompt; `location` is its name in errors."""
    names = {field} if isinstance(record, dict) and field in record else {"prompt", "completion"}
    if not isinstance(record, dict) or any(record.get(name) is None for name in names):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise RowError(
            location,
            f"has no text under {field!r} (it has: {has[:200]}); name the field: text=NAME, or give records with "
            "prompt and completion",
            f"has no text under {field!r}",
        )
    for name in sorted(names, reverse=True):
        if not isinstance(record[name], str):
            kind = type(record[name]).__name__
            raise RowError(location, f"has a {name} of {kind}; expected text", f"a {name} of {kind}")
    return (Piece(record[field]) if field in names else Piece(record["completion"], prompt=record["prompt"]),)
