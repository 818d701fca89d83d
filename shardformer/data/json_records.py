"""JSON arrays as records, one at a time, and files that hold records of JSON under the suffix of a text."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from shardformer.errors import UsageError

CHUNK = 1 << 20  # bytes that are read at a time
SNIFFED = 1 << 16  # bytes at a file's start that decide its format
MARGIN = 16  # characters at the end of a buffer in which a value may be incomplete rather than wrong
ARRAY = re.compile(r"\ufeff?\s*\[")
ARRAY_OF_OBJECTS = re.compile(r"\ufeff?\s*\[\s*\{")
OBJECT = re.compile(r'\ufeff?\s*\{\s*(?:"|\}\s*$)')
# Published files also wrap their records: {"data": [{...}]}, one conversation, or an array of arrays of messages.
WRAPPED = re.compile(
    r'\ufeff?\s*(?:\[\s*\[\s*\{|\{[^\[{}]*"(?:data|train|examples|instances|records|rows|messages|conversations)"'
    r"\s*:\s*\[\s*\{)"
)
SPACE = re.compile(r"\s*")


def contains_array(beginning: str) -> bool:
    return ARRAY.match(beginning) is not None


def contains_records(beginning: str) -> bool:
    """Returns whether a text starts as an array of objects, or with a line that is an object."""
    if ARRAY_OF_OBJECTS.match(beginning):
        return True
    if not OBJECT.match(beginning):
        return False
    line, line_feed, _ = beginning.lstrip("\ufeff \t\r\n").partition("\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return not line_feed and len(beginning) >= SNIFFED // 4  # the line is longer than what was read
    return True


def wraps_records(beginning: str) -> bool:
    """Returns whether a text starts with records that are inside of an object or of another array."""
    return WRAPPED.match(beginning) is not None


def read_array(file: BinaryIO, name: str, most: int) -> Iterator[tuple[bytes, str]]:
    """Yields each element of a JSON array as JSON, with its name in errors; stores one element of at most `most` bytes.

    The buffer doubles while an element is incomplete, so that a long one is not parsed once for every chunk.
    """
    buffer = _Buffer(file, name, most)
    buffer.skip_space()
    if buffer.take() != "[":
        raise UsageError(f"{name} is not a JSON array")
    number, symbol = 0, buffer.peek()
    while symbol != "]":
        number += 1
        location = f"{name}, record {number}"
        yield buffer.read_value(location).encode("utf-8", "surrogatepass"), location
        symbol = buffer.peek()
        if symbol not in (",", "]"):
            raise UsageError(f"{location}, is followed by {symbol!r} instead of a comma or the end of the array")
        if symbol == ",":
            buffer.take()
            buffer.skip_space()
    buffer.take()
    if rest := buffer.peek():
        raise UsageError(f"{name} has {rest!r} after the end of its array; write one array, or .jsonl")


class _Buffer:
    """The unread part of a file of JSON."""

    def __init__(self, file: BinaryIO, name: str, most: int):
        self._file, self._name, self._most = file, name, most
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._position, self._is_complete = "", 0, False

    def peek(self) -> str:
        """Returns the next character behind white space; an empty text at the end of the file."""
        self.skip_space()
        return self._text[self._position : self._position + 1]

    def take(self) -> str:
        result = self._text[self._position : self._position + 1]
        self._position += 1
        return result

    def skip_space(self) -> None:
        while True:
            result = SPACE.match(self._text, self._position)
            self._position = result.end() if result else self._position
            if self._position < len(self._text) or self._is_complete:
                return
            self._read_more()

    def read_value(self, location: str) -> str:
        """Returns the text of the next value; raises UsageError that names `location`."""
        while True:
            try:
                _, end = self._parse(self._text, self._position)
            except RecursionError:
                raise UsageError(f"{location}, is nested too deep") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - MARGIN
                if self._is_complete or not is_cut:
                    is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text.rstrip())
                    reason = "is cut: the file ends inside of it" if is_cut else f"is not JSON: {error.msg}"
                    raise UsageError(f"{location}, {reason}") from None
            else:
                if end - self._position > self._most:
                    raise UsageError(f"{location}, has more than {self._most:,} characters; cut it into documents")
                follows = self._text[end : end + 1]
                if self._is_complete or (follows and follows not in ".eE"):  # else a number may go on
                    result, self._position = self._text[self._position : end], end
                    return result
            if len(self._text) - self._position > self._most:
                raise UsageError(f"{location}, has more than {self._most:,} characters; cut it into documents")
            self._read_more()

    def _read_more(self) -> None:
        self._text, self._position = self._text[self._position :], 0
        content = self._file.read(max(CHUNK, len(self._text)))
        self._is_complete = not content
        try:
            self._text += self._decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._name} is not UTF-8: {error.reason}; convert it, for example with iconv") from None
