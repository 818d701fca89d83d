"""Conversations to the ids of a prompt, and generated ids to the reply alone."""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Sequence

from shardformer.data import Vocabulary
from shardformer.data.chat.chat_format import ChatFormat
from shardformer.data.chat.conversations import Conversation, join_parts, make_conversation
from shardformer.data.chat.spans import MARK, render_with_spans
from shardformer.data.chat.template_process import RenderError, TemplateProcess, render_either_form
from shardformer.errors import UsageError
from shardformer.inference.sampling import Stops, cut_text


class ChatCodec:
    """A vocabulary with a chat template: prompts end where an assistant starts, replies at the end of its turn.

    `ends` are further ids that end a reply, those of the model; `stops` further strings.
    """

    def __init__(self, vocabulary: Vocabulary, format: ChatFormat, ends: Sequence[int] = (), stops: Sequence[str] = ()):
        self.vocabulary, self.format = vocabulary, format
        with TemplateProcess(format) as process:
            token, string = _find_end_of_turn(process, vocabulary)
            self._reads_parts = _reads_parts(process)
        self.ends = frozenset([*ends, *([] if token is None else [token])])
        self.strings = [*stops, *([string] if token is None and string else [])]
        self._retained: frozenset[int] = frozenset()

    def with_stops(self, stops: Sequence[str], only: bool = False) -> "ChatCodec":
        """Returns this codec with further strings that end a reply; only=True drops its own."""
        result = copy.copy(self)
        result.strings = [*stops, *([] if only else self.strings)]
        return result

    def with_retained(self, texts: Sequence[str]) -> "ChatCodec":
        """Returns this codec with replies that retain the special tokens of some texts, as of those around a call."""
        result = copy.copy(self)
        ids = (self.vocabulary.encode_with_offsets(text)[0].tolist() for text in texts)
        result._retained = frozenset(alone[0] for alone in ids if len(alone) == 1 and self._is_special(alone[0]))
        return result

    def start_process(self) -> TemplateProcess:
        """Starts the process that renders prompts, with today's date."""
        return TemplateProcess(self.format, now=True, letters=self.vocabulary.letters)

    def encode_all(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Returns the ids of each conversation with the header of the assistant's next turn."""
        with self.start_process() as process:
            return [self.encode(process, conversation) for conversation in conversations]

    def encode(self, process: TemplateProcess, conversation: Conversation, opening: str = "") -> list[int]:
        """Returns the ids of one conversation of `encode_all`; raises UsageError for tools that it would lack.

        opening: the first part of the reply.
        """

        def render(conversation):
            return process.render(conversation, with_prompt=True).text

        conversation = process.guard(conversation if self._reads_parts else _with_joined_parts(conversation))
        text = render_either_form(render, conversation)
        if conversation.tools:
            with contextlib.suppress(RenderError):  # by a template that needs tools
                if render_either_form(render, dataclasses.replace(conversation, tools=[])) == text:
                    raise UsageError(
                        f"tools are given, and the chat template of {self.format.name} does not read them; leave tools "
                        "out"
                    )
        return self.vocabulary.encode_with_offsets(text + opening, "prompt")[0].tolist()

    def make_stops(self, ignore_ends: bool = False) -> Stops:
        """Returns the condition that ends a reply; ignore_ends=True leaves strings only."""
        return Stops(self.vocabulary, self.strings, () if ignore_ends else self.ends)

    def read_reply(self, ids: Sequence[int]) -> str:
        """Returns the text of a reply without special tokens."""
        retained = list(ids[:-1] if ids and ids[-1] in self.ends else ids)
        return cut_text(self.decode(retained), self.strings)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens, but with those of `with_retained`."""
        if self._retained.isdisjoint(ids):
            return self.vocabulary.decode_without_special_tokens(ids)
        return self.vocabulary.decode(
            [token for token in ids if token in self._retained or not self._is_special(token)]
        )

    def _is_special(self, token: int) -> bool:
        return bool(self.vocabulary.decode([token])) and not self.vocabulary.decode_without_special_tokens([token])


def parse_prompt(text: str) -> Conversation:
    """Returns the conversation of a prompt: a JSON list of messages, or the text of a user."""
    messages = None
    if text.lstrip().startswith("["):
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError):
            messages = None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        messages = [{"role": "user", "content": text}]
    return make_conversation({"messages": messages}, "prompt")


def _reads_parts(process: TemplateProcess) -> bool:
    """Returns whether a template reads a content of parts as the text in them; many fail, or write Python's lists."""
    contents = MARK, [{"type": "text", "text": MARK}]
    try:
        texts = [process.render(Conversation([{"role": "user", "content": content}])).text for content in contents]
    except RenderError:
        return False
    return texts[0] == texts[1]


def _with_joined_parts(conversation: Conversation) -> Conversation:
    return conversation.replace([
        message | {"content": join_parts(message["content"])} if isinstance(message.get("content"), list) else message
        for message in conversation.messages
    ])  # fmt: skip


def _find_end_of_turn(process: TemplateProcess, vocabulary: Vocabulary) -> tuple[int | None, str]:
    """Returns the special token that ends an assistant's turn, else None and the text that does."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
    text, spans = render_with_spans(process, Conversation(turns))
    trained = text[slice(*spans[-1])] if spans else text
    end = trained.partition(MARK)[2] or text.partition(MARK)[2]
    ids = vocabulary.encode_with_offsets(end.lstrip() or end)[0].tolist()
    is_special = bool(ids) and bool(end.strip()) and not vocabulary.decode_without_special_tokens(ids[:1])
    return (ids[0], "") if is_special else (None, end)
