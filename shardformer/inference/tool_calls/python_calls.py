"""Tool calls that are written as Python: [weather(city='Rome', days=2), clock()]."""

import re
import sys
from typing import Any

from shardformer.inference.tool_calls.json_calls import Call, OpenString, make_call

DEEPEST = 100  # lists and objects in each other
SPACES, NAME = re.compile(r"\s*"), re.compile(r"[A-Za-z_][\w.-]*")
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
DIGITS = r"\d+(?:_\d+)*"
NUMBER = re.compile(rf"[+-]?(?:{DIGITS}(?:\.(?:{DIGITS})?)?|\.{DIGITS})(?:[eE][+-]?{DIGITS})?")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[abfnrtv'\"\\/\n])")
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def parse_python(text: str) -> list[Call]:
    """Returns the calls of a list, or one call; raises ValueError for any other text."""
    reader = _Reader(text)
    calls = reader.read_until("]", reader.read_call) if reader.accept("[") else [reader.read_call()]
    if reader.rest:
        raise ValueError("expected the end")
    return calls


class _Reader:
    def __init__(self, text: str):
        self._text, self._place, self._depth = text, 0, 0

    @property
    def rest(self) -> bool:
        """Returns whether anything but spaces follows."""
        self._skip()
        return self._place < len(self._text)

    def read_call(self) -> Call:
        name = self._take(NAME)
        self.expect("(")
        return make_call(name, dict(self.read_until(")", lambda: self._read_pair(self._read_name, "="))))

    def read_until(self, end: str, read) -> list:
        """Returns what `read` returns for each part up to the end; commas are between the parts."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("nested too deeply")
        parts: list = []
        while not self.accept(end):
            if parts:
                self.expect(",")
                if self.accept(end):
                    break
            parts.append(read())
        self._depth -= 1
        return parts

    def accept(self, text: str) -> bool:
        self._skip()
        found = self._text.startswith(text, self._place)
        self._place += len(text) * found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise ValueError(f"expected {text}")

    def _read_pair(self, read_key, between: str) -> tuple[str, Any]:
        key = read_key()
        self.expect(between)
        return key, self._read_value()

    def _read_name(self) -> str:
        return self._take(NAME)

    def _read_value(self) -> Any:
        if self.accept("["):
            return self.read_until("]", self._read_value)
        if self.accept("{"):
            return dict(self.read_until("}", lambda: self._read_pair(self._read_string, ":")))
        if self._text.startswith(("'", '"'), self._place):
            return self._read_string()
        if NUMBER.match(self._text, self._place):
            number = self._take(NUMBER)
            return float(number) if set(number) & set(".eE") else int(number)
        word = self._take(NAME)
        if word not in WORDS:
            raise ValueError(f"expected a value, got {word:.60}")
        return WORDS[word]

    def _read_string(self) -> str:
        self._skip()
        if self._text.startswith(("'", '"'), self._place) and not STRING.match(self._text, self._place):
            raise OpenString("expected the end of a string")
        return ESCAPE.sub(_unescape, self._take(STRING)[1:-1])

    def _take(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        match = pattern.match(self._text, self._place)
        if not match:
            raise ValueError(f"expected {pattern.pattern}")
        self._place = match.end()
        return match[0]

    def _skip(self) -> None:
        match = SPACES.match(self._text, self._place)
        assert match
        self._place = match.end()


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return ESCAPED.get(code, code)
    number = int(code[1:], 16)
    if number > sys.maxunicode:
        raise ValueError(f"expected a character, got {match[0]}")
    return chr(number)
