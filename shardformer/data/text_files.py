"""Files of text as streams of documents, in pieces that fit in memory: plain text, .jsonl, and both packed."""

import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from shardformer.errors import UsageError

PIECE = 1 << 16  # characters that are encoded as one; thousands of them keep all cores busy
RANGE = 16 << 20  # bytes of a plain file that are read as one
LOOK_AHEAD = 1 << 20  # bytes in which a line break is looked for, before a text is cut elsewhere
MAX_LINE = 256 << 20  # bytes of a .jsonl file's line
MAX_EXPANSION = 200  # times that a packed file may grow, beyond its first MAX_LINE bytes
JSON_LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")

# A line break between two letters ends a word for every byte-level tokenizer: cutting there changes no token.
SAFE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")
SAFE_BREAK_BYTES = re.compile(rb"(?<=[^\s])\n(?=[^\s])")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text of one document; the last piece of it ends it."""

    text: str
    ends: bool = True
    prompt: str = ""  # what comes before it and is not to be learned


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A part of a plain text file, or a whole .jsonl or packed one."""

    path: Path
    start: int
    end: int
    ends: bool  # whether the document ends here

    @property
    def is_plain(self) -> bool:
        return not is_json_lines(self.path) and self.path.suffix not in PACKED


def is_json_lines(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower() in JSON_LINES


def read_pieces(part: FileRange, field: str) -> Iterator[Piece]:
    """All text of a range, documents in order; `field` names the text in the records of .jsonl files."""
    try:
        if is_json_lines(part.path):
            yield from _read_records(part.path, field)
        elif part.path.suffix in PACKED:
            yield from _read_packed_text(part.path)
        else:
            yield from _cut(_decode(part.path, _read_range(part), part.start), part.ends)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{part.path} is truncated or not packed by gzip: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {part.path}: {error.strerror or error}") from None


def cut_ranges(path: Path, size: int, start: int = 0) -> list[FileRange]:
    """A plain text file from `start` to `size` in ranges of about RANGE bytes, cut between words."""
    borders = [start]
    with open(path, "rb") as file:
        while size - borders[-1] > RANGE + LOOK_AHEAD:
            borders.append(find_break(file, borders[-1] + RANGE, size))
    borders.append(size)
    pairs = itertools.pairwise(borders)
    return [FileRange(path, a, b, b == size) for a, b in pairs if a < b or size == start]


def find_break(file, position: int, size: int) -> int:
    """The first place from `position` on where the bytes of a text may be cut."""
    file.seek(max(position - 1, 0))
    ahead = file.read(LOOK_AHEAD)
    if found := SAFE_BREAK_BYTES.search(ahead, 1):
        return min(max(position - 1, 0) + found.end(), size)
    offset = ahead.find(b"\n", 1) + 1 or 1  # else at any line break, else between characters
    while offset < len(ahead) and ahead[offset] & 0xC0 == 0x80:
        offset += 1
    return min(max(position - 1, 0) + offset, size)


def cut_text(text: str, size: int = 0) -> list[str]:
    """A text in pieces of at least `size` characters, cut where no byte-level tokenizer joins letters."""
    size, pieces, start = size or PIECE, [], 0
    while len(text) - start > 2 * size:
        found = SAFE_BREAK.search(text, start + size)
        if not found:
            break
        pieces.append(text[start : found.end()])
        start = found.end()
    return [*pieces, text[start:]]


def _cut(text: str, ends: bool) -> Iterator[Piece]:
    *pieces, last = cut_text(text)
    yield from (Piece(piece, ends=False) for piece in pieces)
    yield Piece(last, ends)


def read_text(path: Path) -> str:
    """A whole file."""
    try:
        return _decode(path, path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read data={path}: {error.strerror}") from None


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
            f"data={path} is not UTF-8: {error.reason} (0x{content[error.start]:02X}) at byte {start + error.start}; "
            "convert it, for example with iconv"
        ) from None


def _read_packed_text(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(path) as file:
        for content in itertools.chain(iter(lambda: file.read(LOOK_AHEAD), b""), [b""]):
            try:
                yield Piece(decoder.decode(content, final=not content), ends=False)
            except UnicodeDecodeError as error:
                raise UsageError(f"{path} is not UTF-8: {error.reason}; convert it, for example with iconv") from None
    yield Piece("")


def _read_records(path: Path, field: str) -> Iterator[Piece]:
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE:
                raise UsageError(f"{path}, line {number}, has more than {MAX_LINE:,} bytes; cut it into documents")
            if line.strip():
                yield from _read_record(line, field, f"{path}, line {number}")


def _read_record(line: bytes, field: str, place: str) -> Iterator[Piece]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}, is not JSON: {error}") from None
    if isinstance(record, dict) and field not in record and {"prompt", "completion"} <= record.keys():
        prompt, text = record["prompt"], record["completion"]
    else:
        prompt, text = "", record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str) or not isinstance(prompt, str):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UsageError(
            f"{place}, has no text under {field!r} (it has: {has[:200]}); name the field: text=NAME, or give records "
            "with prompt and completion"
        )
    pieces = list(_cut(text, ends=True))
    yield dataclasses.replace(pieces[0], prompt=prompt)
    yield from pieces[1:]


@contextlib.contextmanager
def _open(path: Path):
    """The bytes of a file, unpacked as they are read, never much more of them than it can honestly hold."""
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield io.BufferedReader(_Bounded(file, path), LOOK_AHEAD)
    elif path.suffix == ".zst":
        with open(path, "rb") as packed:
            yield io.BufferedReader(_Bounded(_ZstdReader(packed, path), path), LOOK_AHEAD)
    else:
        with open(path, "rb", buffering=LOOK_AHEAD) as file:
            yield file


def check_expansion(path: Path, unpacked: int) -> None:
    """Raises where a packed file has grown more than text ever does: a decompression bomb fills the disk."""
    if unpacked > MAX_LINE + MAX_EXPANSION * path.stat().st_size:
        raise UsageError(
            f"{path} grows more than {MAX_EXPANSION} times when it is unpacked, which no text does; "
            "unpack it yourself if this is meant"
        )


class _Bounded(io.RawIOBase):
    """A packed file as it is unpacked, refused as soon as it has grown too much."""

    def __init__(self, file, path: Path):
        self._file, self._path, self._unpacked = file, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = self._file.read(len(buffer))
        self._unpacked += len(content)
        check_expansion(self._path, self._unpacked)
        buffer[: len(content)] = content
        return len(content)


class _ZstdReader:
    """`read` of a .zst file, which notices where one was cut short."""

    CHUNK = 4096  # packed bytes at once: unpacked they are 128 MB at the very most

    def __init__(self, file, path: Path):
        try:
            import zstandard
        except ModuleNotFoundError:
            raise UsageError(
                f"{path} needs the package zstandard to be unpacked: pip install zstandard, or unpack it: unzstd {path}"
            ) from None
        self._package, self._file, self._path = zstandard, file, path
        self._frame, self._unread, self._waiting = None, b"", memoryview(b"")

    def read(self, size: int):
        while not self._waiting:
            packed = self._unread or self._file.read(self.CHUNK)
            if not packed:
                if self._frame and not self._frame.eof:
                    raise UsageError(f"{self._path} is truncated: its last zstd frame is incomplete")
                return b""
            if not self._frame or self._frame.eof:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            try:
                self._waiting = memoryview(self._frame.decompress(packed))
            except self._package.ZstdError as error:
                raise UsageError(f"{self._path} is damaged or not packed by zstd: {error}") from None
            self._unread = self._frame.unused_data
        found, self._waiting = self._waiting[:size], self._waiting[size:]
        return found
