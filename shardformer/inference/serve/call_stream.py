"""The content and the tool calls of an answer, as its text comes."""

import re
from collections.abc import Mapping
from typing import Any

from shardformer.inference.serve.text_stream import measure_before
from shardformer.inference.tool_calls.closing_search import ClosingSearch
from shardformer.inference.tool_calls.json_calls import LONGEST, Call
from shardformer.inference.tool_calls.tool_formats import ToolFormat

OBJECT = re.compile(r"\s*(\{|\Z)")  # or what may become one


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
        self.count = 0  # calls so far

    def push(self, text: str, ended: bool = False) -> tuple[str, list[Call]]:
        """Returns the content and the calls that are certain with more of the text; ended: with all of it."""
        self._text += text
        content, calls = "", []
        while self._text:
            start = self._find_start(ended)
            if start:
                content += self._show(self._text[:start])
                self._text = self._text[start:]
                continue
            length = self._measure_call(ended)
            if not length:
                break
            piece, self._text, self._search = self._text[:length], self._text[length:], None
            found = self._parse(piece)
            if not found:
                start = piece.find(self._format.opening, 1) if self._format.opening else -1
                if start > 0:  # this opening was only text, or its call was broken off
                    piece, self._text = piece[:start], piece[start:] + self._text
                content += self._show(piece)
                continue
            retained = found if self._most is None else found[: max(self._most - self.count, 0)]
            calls += retained
            self.count += len(retained)
            self._follows_call = True
        if ended:
            content += "" if self._follows_call else self._spaces
        return content, calls

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
        opening = self._format.opening
        if not self._search:
            if not self._text.startswith(opening):  # may be a part of one
                return len(self._text) * ended
            self._search = ClosingSearch(closing, self._format.quotes)
        end = self._search.find(self._text)
        if end < 0 and ended:  # a string may have no end
            end = self._text.find(closing) + len(closing) if closing in self._text else len(self._text)
        return max(end, 0)

    def _parse(self, text: str) -> list[Call]:
        """Returns the calls of a text; none if any part of it is something else."""
        inside = text.strip().removeprefix(self._format.opening).removesuffix(self._format.closing)
        try:
            calls = self._format.read(inside, self._schemas) if len(inside) <= LONGEST else []
        except (ValueError, RecursionError):
            return []
        return calls if all(call.name in self._schemas for call in calls) else []

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
