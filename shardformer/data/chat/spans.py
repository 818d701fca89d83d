"""The spans of a rendered conversation that are learned: what an assistant writes, its end of turn included.

A template with {% generation %} names them. For all others, beginnings of the conversation are rendered with and
without each assistant's turn and compared.
"""

import re
from collections.abc import Iterator

from shardformer.data.chat.conversations import Conversation
from shardformer.data.chat.template_process import Rendered, RenderError, TemplateProcess
from shardformer.errors import UsageError

Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "QZXMARKXZQ"  # stands for the content of a turn, to find what surrounds it


class SpansNotFound(UsageError):
    """A template whose turns cannot be told apart."""


def render_with_spans(process: TemplateProcess, conversation: Conversation) -> tuple[str, list[Span]]:
    """Returns the text of a conversation and the spans of what its assistants write."""
    if GENERATION.search(process.format.choose_template(conversation.tools)):
        found = process.render(conversation)
        return found.text, list(found.spans)
    return _compare_turns(process, conversation)


def _compare_turns(process: TemplateProcess, conversation: Conversation) -> tuple[str, list[Span]]:
    """Finds each assistant's turn between the renderings of the messages before it and with it."""
    messages = conversation.messages
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    renders = [(len(messages), False)] + [pair for n in turns for pair in ((n, True), (n + 1, False))]
    whole, *others = process.render_all(conversation, renders)
    if isinstance(whole, RenderError):
        raise whole
    spans = []
    for n, before, after in zip(turns, others[::2], others[1::2], strict=True):
        span = _find_between(whole.text, before, after)
        if span is None:
            span = _TurnSearch(process, conversation, whole.text, n).find()
        spans.append(_leave_out_space(whole.text, span, messages[n].get("content")))
    _check_order(spans, process)
    return whole.text, spans


def _find_between(text: str, before: Rendered | RenderError, after: Rendered | RenderError) -> Span | None:
    """Returns the span between two renderings if the text begins with both."""
    if isinstance(before, RenderError) or isinstance(after, RenderError):
        return None
    if not (after.text.startswith(before.text) and text.startswith(after.text)):
        return None
    return len(before.text), len(after.text)


class _TurnSearch:
    """The search for one turn that a template renders in another way once further messages follow.

    A text in the turn is replaced by MARK. The texts around MARK are the beginning of the turn and its end.
    """

    def __init__(self, process: TemplateProcess, conversation: Conversation, text: str, number: int):
        self.process, self.conversation, self.text, self.number = process, conversation, text, number

    def find(self) -> Span:
        """Returns the span of the turn; raises SpansNotFound with the reason."""
        failure = self._fail("it has neither text nor a tool call")
        for marked in _with_marks(self.conversation, self.number):
            try:
                return self._find_marked(marked)
            except SpansNotFound as error:
                failure = error
        raise failure

    def _find_marked(self, marked: Conversation) -> Span:
        renders = [(len(marked.messages), False), (self.number + 1, False), (self.number, True), (self.number, False)]
        found = self.process.render_all(marked, renders)
        whole, after, before = (self._text_of(result) for result in found[:3])
        if whole.count(MARK) != 1 or after.count(MARK) != 1:
            raise self._fail("it does not show the message once")
        bare = "" if isinstance(found[3], RenderError) else found[3].text
        head, tail = whole.split(MARK)
        rest = tail[len(self._find_end(after, tail)) :]
        start = self._find_start(head, after, before, bare)
        if not (self.text.startswith(head) and self.text.endswith(rest) and start + len(rest) < len(self.text)):
            raise self._fail("the text of other messages depends on it")
        return start, len(self.text) - len(rest)

    def _find_start(self, head: str, after: str, before: str, bare: str) -> int:
        """Returns where the turn begins: behind the prompt of the turn, `before` without `bare`."""
        prompt = before[_common_length(before, bare) :]
        lead = after.split(MARK)[0].removeprefix(before) if after.startswith(before) else ""
        # Earlier turns may lack the beginning of a last one, such as <think></think>.
        for skipped in range(len(lead) + 1 if prompt else 1):
            if head.endswith(prompt + lead[skipped:]):
                return len(head) - len(lead) + skipped
        raise self._fail("its header differs from the prompt of a turn")

    def _find_end(self, after: str, tail: str) -> str:
        """Returns the text that ends the turn: what follows both as the last turn and before other messages."""
        end = after.split(MARK)[1]
        eos = self.process.format.tokens.get("eos_token") or MARK
        for candidate in (end, end.rstrip(), end.rstrip().removesuffix(eos), end.rstrip().removesuffix(eos).rstrip()):
            if candidate and tail.startswith(candidate):
                return candidate
        raise self._fail("its end of turn differs when other messages follow")

    def _text_of(self, result: Rendered | RenderError) -> str:
        if isinstance(result, RenderError):
            raise self._fail(f"messages up to there cannot be rendered: {result}")
        return result.text

    def _fail(self, reason: str) -> SpansNotFound:
        return SpansNotFound(
            f"the chat template of {self.process.format.name} does not show where the assistant's message "
            f"{self.number + 1} begins and ends ({reason}); mark it in the template: {{% generation %}}..."
            "{% endgeneration %}, or give another one: chat_template=NAME"
        )


def _with_marks(conversation: Conversation, number: int) -> Iterator[Conversation]:
    """Yields the conversation with MARK as the content of a message, and as the name of its first tool."""
    message = conversation.messages[number]
    changed: list[dict] = []
    if isinstance(message.get("content"), str):
        changed.append({"content": MARK})
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[0], dict):
        call = calls[0]
        inner = call.get("function")
        call = call | ({"function": inner | {"name": MARK}} if isinstance(inner, dict) else {"name": MARK})
        changed.insert(0 if not message.get("content") else 1, {"tool_calls": [call, *calls[1:]]})
    for change in changed:
        messages = list(conversation.messages)
        messages[number] = message | change
        yield Conversation(messages, conversation.tools, conversation.options)


def _common_length(first: str, second: str) -> int:
    shorter = min(len(first), len(second))
    return next((n for n in range(shorter) if first[n] != second[n]), shorter)


def _leave_out_space(text: str, span: Span, content) -> Span:
    """Returns the span without white space behind the marker that ends the turn: nothing of it is generated."""
    turn = text[span[0] : span[1]]
    shown = turn.rstrip()
    content = content.strip() if isinstance(content, str) else ""
    has_marker = shown and not (content and shown.endswith(content))
    return (span[0], span[0] + len(shown)) if has_marker else span


def _check_order(spans: list[Span], process: TemplateProcess) -> None:
    border = 0
    for start, end in spans:
        if not border <= start < end:
            raise SpansNotFound(
                f"the chat template of {process.format.name} is rejected: the spans of its assistant's turns "
                "overlap or are empty; give another one: chat_template=NAME"
            )
        border = end
