"""The content and the tool calls of an answer, as its text comes."""

import re
from collections.abc import Mapping
from typing import Any

from shardformer.inference.serve.text_stream import measure_before
from shardformer.inference.tool_calls.closing_search import ClosingSearch
from shardformer.inference.tool_calls.json_calls import LONGEST, Call, OpenString
from shardformer.inference.tool_calls.tool_formats import ToolFormat

OBJECT = re.compile(r"\s*(\{|\Z)")  # or what may become one
MOST_TRIES = 16  # openings before one closing at which its call may begin: each takes time for all of the text


class CallStream:
    """Splits a text into content and calls. A call is sent when it is complete; a text that is none stays content.

    schemas: of the arguments of the functions that may be called, by name.
    most: calls that are returned; later ones are dropped.
    """

    def __init__(self, format: ToolFormat, schemas: Mapping[str, Any], most: int | None = None):
        self._format, self._schemas, self._most = format, schemas, most
        self._text = ""  # which may be the beginning of a call
        self._spaces = ""  # at the end of the content so far: spaces next to a call are no content, unless both
        self._after_call = ""  # sides of it have some
        self._has_content = False
        self._is_bare = format.is_bare  # an object would be a call: no content came before
        self._follows_call = False
        self._search: ClosingSearch | None = None  # for the end of the call at the beginning of the text
        self._quotes = format.quotes  # of strings that may have closings; none after a string that had no end
        self.count = 0  # calls so far

    def push(self, text: str, ended: bool = False) -> list[str | Call]:
        """Returns the content and the calls, in their order, that are certain with more of the text.

        ended: with all of it.
        """
        self._text += text
        parts: list[str | Call] = []
        while self._text:
            start = self._find_start(ended)
            if start:
                _add_content(parts, self._show(self._text[:start]))
                self._text = self._text[start:]
                continue
            length = self._measure_call(ended)
            if not length:
                break
            piece = self._text[:length]
            calls, is_open = self._parse(piece)
            if is_open and self._quotes and self._search and not self._search.quotes:
                self._search, self._quotes = ClosingSearch(self._format.closing, self._quotes), ""
                continue  # this closing may be a part of a string
            self._text = self._text[length:]
            if calls:
                parts += self._count(calls)
                if self._search and self._search.quotes:
                    self._quotes = self._search.quotes
            else:
                start = self._find_next_opening(piece)
                piece, self._text = piece[:start], piece[start:] + self._text
                _add_content(parts, self._show(piece))
            self._search = None
        if ended and not self._follows_call:
            _add_content(parts, self._spaces)
        return parts

    def _find_start(self, ended: bool) -> int:
        """Returns the length of the text before a call, or before what may be the beginning of one."""
        if self._search or (self._is_bare and OBJECT.match(self._text)):
            return 0
        opening = self._format.opening
        if not opening or (ended and opening not in self._text):
            return len(self._text)
        return measure_before(self._text, [opening])

    def _measure_call(self, ended: bool) -> int:
        """Returns the length of the call at the beginning of the text; 0 if it may go on."""
        closing = self._format.closing
        if not closing:
            return len(self._text) * ended
        if not self._search:
            if not self._text.startswith(self._format.opening):  # may be a part of one
                return len(self._text) * ended
            self._search = ClosingSearch(closing)
        end = self._search.find(self._text)
        if end < 0 and ended:  # a string may have no end
            end = self._text.find(closing) + len(closing) if closing in self._text else len(self._text)
        return max(end, 0)

    def _parse(self, text: str) -> tuple[list[Call], bool]:
        """Returns the calls of a text, and whether it ends in a string. No calls if any part of it is no call."""
        inside = text.strip().removeprefix(self._format.opening).removesuffix(self._format.closing)
        try:
            calls = self._format.read(inside, self._schemas) if len(inside) <= LONGEST else []
        except OpenString:
            return [], True
        except (ValueError, RecursionError):
            return [], False
        return calls if all(call.name in self._schemas for call in calls) else [], False

    def _count(self, calls: list[Call]) -> list[Call]:
        """Returns the calls that are not too many."""
        self._follows_call = True
        retained = calls if self._most is None else calls[: max(self._most - self.count, 0)]
        self.count += len(retained)
        return retained

    def _find_next_opening(self, piece: str) -> int:
        """Returns where a call may begin in a piece whose opening was only text, or of a call that was broken off."""
        opening = self._format.opening
        found = re.finditer(re.escape(opening), piece) if opening else ()
        starts = [match.start() for match in found if match.start()]
        return starts[-MOST_TRIES:][0] if starts else len(piece)

    def _show(self, content: str) -> str:
        """Returns the content that can be sent: without spaces that a call may follow, or that follow one."""
        self._is_bare = False
        if self._follows_call:
            stripped = content.lstrip()
            self._after_call += content[: len(content) - len(stripped)]
            if not stripped:
                return ""
            content = (self._spaces or self._after_call) * self._has_content + stripped
            self._follows_call, self._after_call = False, ""
        else:
            content = self._spaces + content
        shown = content.rstrip()
        self._spaces = content[len(shown) :]
        self._has_content |= bool(shown)
        return shown


def _add_content(parts: list[str | Call], content: str) -> None:
    """Adds a content that may be empty to the one at the end."""
    if content and parts and isinstance(parts[-1], str):
        parts[-1] += content
    elif content:
        parts.append(content)
