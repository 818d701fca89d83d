"""The spans of a rendered conversation with a loss: what an assistant writes, its end of turn included.

A template with {% generation %} names them. For other templates, prefixes of the conversation are rendered with and
without an assistant's turn and compared. In a long conversation this is done for one of all turns that look alike, as
two renderings for each turn would take quadratic time.
"""

import functools
import itertools
import re
from collections.abc import Iterator

from shardformer.data.chat.conversations import Conversation
from shardformer.data.chat.template_process import RenderError, TemplateProcess, render_either_form
from shardformer.errors import UsageError

Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK, BEFORE = "QZXMARKXZQ", "QZXBEFOREXZQ"  # stand for the content of two messages, to find what surrounds them
MANY = 16  # turns; more are not rendered one by one
BORDER = re.compile(r"QZX(\d+[AB])XZQ")  # the start or the end of the content of a message, by the message's number


class SpansNotFound(UsageError):
    """A template whose turns cannot be distinguished, or that leaves out a part of them."""

    cause = "the chat template does not show what an assistant writes"


def render_with_spans(process: TemplateProcess, conversation: Conversation) -> tuple[str, list[Span]]:
    """Returns the text of a conversation and the spans of it with a loss: what its assistants write."""
    template = process.format.choose_template(conversation.tools)
    conversation = process.guard(conversation)
    find = _find_blocks if GENERATION.search(template) else _compare_turns
    return render_either_form(functools.partial(find, process), conversation)


def _find_blocks(process: TemplateProcess, conversation: Conversation) -> tuple[str, list[Span]]:
    """Returns the spans of {% generation %}; with weights of messages there must be one block for each reply."""
    result = process.render(conversation)
    spans, replies = list(result.spans), conversation.replies
    _check_calls(process, conversation, replies, [_join_spans(result.text, spans)] * len(replies))
    if not conversation.unlearned:
        return result.text, spans
    if len(spans) != len(replies):
        raise SpansNotFound(
            f"the chat template of {process.format.name} has {len(spans)} blocks of {{% generation %}} for "
            f"{len(replies)} replies, so that those of weight 0 cannot be told apart; leave the weights out"
        )
    return result.text, [span for n, span in zip(replies, spans, strict=True) if n not in conversation.unlearned]


def _join_spans(text: str, spans: list[Span]) -> str:
    return "\n".join(text[start:end] for start, end in spans)


def _check_calls(process: TemplateProcess, conversation: Conversation, replies: list[int], turns: list[str]) -> None:
    """Raises SpansNotFound if a template leaves out the tool calls of a turn: an empty turn would be trained on."""
    for n, turn in zip(replies, turns, strict=True):
        for call in conversation.messages[n].get("tool_calls") or ():
            name = str((call["function"] if isinstance(call.get("function"), dict) else call).get("name"))
            if n not in conversation.unlearned and name not in turn:
                raise CallsIgnored(
                    f"the chat template of {process.format.name} leaves out the tool call {name!r:.80} of message "
                    f"{n + 1}, so that an empty turn would be learned; give a template with tools, or leave the "
                    "conversation out"
                )


class CallsIgnored(SpansNotFound):
    """A template that leaves out tool calls."""

    cause = "the chat template leaves out tool calls"


def _compare_turns(process: TemplateProcess, conversation: Conversation) -> tuple[str, list[Span]]:
    """Finds each assistant's turn between the renderings of the messages before it and with it."""
    messages, turns = conversation.messages, conversation.replies
    prefixes = [pair for n in turns for pair in ((n, True), (n + 1, False))]
    are_many = len(turns) > MANY
    whole, lengths = process.measure_prefixes(conversation, prefixes, only_shared=are_many)
    alike = _AlikeTurns(process, conversation, whole.text) if are_many and None in lengths else None
    spans = []
    for n, before, after in zip(turns, lengths[::2], lengths[1::2], strict=True):
        span = alike.find(n) if alike and (before is None or after is None) else None
        if not span:
            if alike and before is after is None:
                before, after = process.measure_prefixes(conversation, [(n, True), (n + 1, False)], is_new=False)[1]
            if before is not None and after is not None and before <= after:
                span = before, after
            else:
                span = _TurnSearch(process, conversation, whole.text, n).find()
            if alike:
                alike.learn(n, span)
        spans.append(_leave_out_space(whole.text, span, messages[n].get("content")))
    _check_order(spans, process)
    _check_calls(process, conversation, turns, [whole.text[start:end] for start, end in spans])
    return whole.text, [span for n, span in zip(turns, spans, strict=True) if n not in conversation.unlearned]


class _AlikeTurns:
    """The turns of a long conversation whose borders are those of a turn that was found before.

    Turns are alike if they and their neighbours have the same roles, and if the text between each border and the
    content before or behind it is the same. One rendering with marks in each message shows the contents.
    """

    def __init__(self, process: TemplateProcess, conversation: Conversation, text: str):
        self.messages, self.text = conversation.messages, text
        self.known: dict[tuple, tuple[list[str], list[str]]] = {}  # texts before and behind both borders
        self.contents: dict[int, Span] = {}  # of the messages whose end is in the text once
        for empty_too in (True, False):  # a template may ask whether a content is empty
            marked = [_mark_content(message, number, empty_too) for number, message in enumerate(self.messages)]
            try:
                [shown] = process.render_again(conversation.replace(marked), [(len(marked), False)])
            except RenderError:
                continue
            parts = BORDER.split(shown)  # text, border, text, ...
            if "".join(parts[::2]) == text and len(set(parts[1::2])) == len(parts) // 2:
                self._locate(parts)
                return

    def _locate(self, parts: list[str]) -> None:
        lengths = itertools.accumulate(map(len, parts[:-1:2]))
        places = dict(zip(parts[1::2], lengths, strict=True))
        for number in range(len(self.messages)):
            if (end := places.get(f"{number}B")) is not None:  # the start may be lost, as that of a thought
                self.contents[number] = places.get(f"{number}A", end), end

    def find(self, number: int) -> Span | None:
        """Returns the span of a turn that is like one that `learn` has got."""
        key, gaps = self._look_around(number)
        borders = []
        for gap, before, behind in zip(gaps, *self.known.get(key, ((), ())), strict=False):
            start, end = gap
            if self.text.startswith(before, start) and start + len(before) <= end:
                borders.append(start + len(before))
            elif self.text.endswith(behind, start, end):
                borders.append(end - len(behind))
        return (borders[0], borders[1]) if len(borders) == 2 else None

    def learn(self, number: int, span: Span) -> None:
        """Remembers how the borders of a turn lie between the contents around them."""
        key, gaps = self._look_around(number)
        if gaps and all(start <= border <= end for border, (start, end) in zip(span, gaps, strict=True)):
            before = [self.text[start:border] for border, (start, _) in zip(span, gaps, strict=True)]
            self.known[key] = before, [self.text[border:end] for border, (_, end) in zip(span, gaps, strict=True)]

    def _look_around(self, number: int) -> tuple[tuple, list[Span]]:
        """Returns the roles around a turn, and the gaps between contents that hold its borders; none if unknown."""
        near = range(number - 1, number + 2)
        if not all(n in self.contents for n in near):
            return (), []
        (_, first), (second, third), (last, _) = (self.contents[n] for n in near)
        return tuple(_describe(self.messages[n]) for n in near), [(first, second), (third, last)]


def _describe(message: dict) -> tuple:
    """Returns what decides how the text next to a content looks: the role, outer white space and tool calls."""
    content = message["content"] if isinstance(message.get("content"), str) else ""
    before, after = len(content) - len(content.lstrip()), len(content.rstrip())
    return message["role"], content[:before], content[after:], not content.strip(), bool(message.get("tool_calls"))


def _mark_content(message: dict, number: int, empty_too: bool) -> dict:
    """Returns a message with marks around its content without outer white space, or the name of its first tool."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else None
    if not (core := (text or "").strip()) and isinstance(calls, list) and calls and isinstance(calls[0], dict):
        inner = calls[0].get("function", calls[0])
        if isinstance(inner, dict) and isinstance(name := inner.get("name"), str):
            inner = inner | {"name": f"QZX{number}AXZQ{name}QZX{number}BXZQ"}
            call = calls[0] | {"function": inner} if "function" in calls[0] else inner
            return message | {"tool_calls": [call, *calls[1:]]}
    elif text is not None and (core or empty_too):
        before, _, after = text.partition(core) if core else (text, "", "")
        return message | {"content": f"{before}QZX{number}AXZQ{core}QZX{number}BXZQ{after}"}
    return message


class _TurnSearch:
    """The search for one turn that a template renders differently once further messages follow.

    Text in the turn is replaced by MARK, one in the message before it by BEFORE. The text between the marks is the
    end of that message, the prompt of the turn and `lead`, the start of the turn.
    """

    def __init__(self, process: TemplateProcess, conversation: Conversation, text: str, number: int):
        self.process, self.conversation, self.text, self.number = process, conversation, text, number

    def find(self) -> Span:
        """Returns the span of the turn; raises SpansNotFound with the reason."""
        failure = self._fail("it has neither text nor a tool call")
        for marked in _with_marks(self.conversation, self.number, MARK):
            for both in _with_marks(marked, self.number - 1, BEFORE) if self.number else [marked]:
                try:
                    return self._find_marked(marked, both)
                except SpansNotFound as error:
                    failure = error
        raise failure

    def _find_marked(self, marked: Conversation, both: Conversation) -> Span:
        count = len(marked.messages)
        whole, after = self._render(marked, [(count, False), (self.number + 1, False)])
        _, tail_alone = self._split(after, MARK)
        head, tail = self._split(whole, MARK)
        rest = tail[len(self._find_end(tail_alone, tail)) :]
        whole, before = self._render(both, [(count, False), (self.number, True)])
        between, _ = self._split(whole, MARK)
        prompt = before
        if self.number:
            between, prompt = self._split(between, BEFORE)[1], self._split(before, BEFORE)[1]
        if not (between.startswith(prompt) and head.endswith(between)):
            raise self._fail("its header differs from the prompt of a turn")
        start, end = len(head) - len(between) + len(prompt), len(self.text) - len(rest)
        if not (self.text.startswith(head) and self.text.endswith(rest) and start < end):
            raise self._fail("the text of other messages depends on it")
        return start, end

    def _find_end(self, alone: str, tail: str) -> str:
        """Returns the text that ends the turn: what follows both as the last turn and before other messages."""
        eos = self.process.format.tokens.get("eos_token") or MARK
        short = alone.rstrip()
        for candidate in (alone, short, short.removesuffix(eos), short.removesuffix(eos).rstrip()):
            if candidate and tail.startswith(candidate):
                return candidate
        raise self._fail("its end of turn differs when other messages follow")

    def _render(self, conversation: Conversation, renders: list[tuple[int, bool]]) -> list[str]:
        try:
            return self.process.render_again(conversation, renders)
        except RenderError as error:
            raise self._fail(f"messages up to there cannot be rendered: {error}") from None

    def _split(self, text: str, mark: str) -> tuple[str, str]:
        parts = text.split(mark)
        if len(parts) != 2:
            raise self._fail("the template does not show it and the message before it once")
        return parts[0], parts[1]

    def _fail(self, reason: str) -> SpansNotFound:
        return SpansNotFound(
            f"the chat template of {self.process.format.name} does not show where the assistant's message "
            f"{self.number + 1} begins and ends ({reason}); mark it in the template: {{% generation %}}..."
            "{% endgeneration %}, or give another one: chat_template=NAME"
        )


def _with_marks(conversation: Conversation, number: int, mark: str) -> Iterator[Conversation]:
    """Yields the conversation with a mark as the content of a message, and as the name of its first tool."""
    message = conversation.messages[number]
    changed: list[dict] = []
    if isinstance(message.get("content"), str):
        changed.append({"content": mark})
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[0], dict):
        call = calls[0]
        inner = call.get("function")
        call = call | ({"function": inner | {"name": mark}} if isinstance(inner, dict) else {"name": mark})
        changed.insert(1 if message.get("content") else 0, {"tool_calls": [call, *calls[1:]]})
    for change in changed:
        messages = list(conversation.messages)
        messages[number] = message | change
        yield conversation.replace(messages)


def _leave_out_space(text: str, span: Span, content) -> Span:
    """Returns the span without white space behind the marker that ends the turn: nothing of it is generated."""
    turn = text[span[0] : span[1]]
    stripped = turn.rstrip()
    content = content.strip() if isinstance(content, str) else ""
    has_marker = stripped and not (content and stripped.endswith(content))
    return (span[0], span[0] + len(stripped)) if has_marker else span


def _check_order(spans: list[Span], process: TemplateProcess) -> None:
    border = 0
    for start, end in spans:
        if not border <= start < end:
            raise SpansNotFound(
                f"the chat template of {process.format.name} is rejected: the spans of its assistant's turns "
                "overlap or are empty; give another one: chat_template=NAME"
            )
        border = end
