"""Files of conversations as documents: text, the spans of it that have a loss, and their token ids and loss mask."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shardformer.data import text_files
from shardformer.data.chat.chat_format import ChatFormat
from shardformer.data.chat.conversations import Conversation, is_chat_record, make_conversation
from shardformer.data.chat.spans import Span, SpansNotFound, render_with_spans
from shardformer.data.chat.template_process import RenderError, TemplateProcess
from shardformer.data.row_report import RowError, RowReport
from shardformer.data.text_files import Piece
from shardformer.errors import UsageError


def are_chat_files(paths: list[Path], field: str) -> bool:
    """Returns whether files hold conversations, by their first record; raises UsageError for a mixture."""
    with_records = [path for path in paths if text_files.contains_records(path)]
    records = dict.fromkeys(paths) | {path: text_files.peek_record(path) for path in with_records}
    chats = [path for path, record in records.items() if is_chat_record(record, field)]
    if chats and len(chats) < len(paths):
        other = next(path for path in paths if path not in chats)
        raise UsageError(f"{chats[0]} holds conversations and {other} holds texts; mix them as sources: data=A=1,B=1")
    return bool(chats)


def read_conversations(
    path: Path,
    format: ChatFormat,
    advance: Callable[[int], object] = lambda _: None,
    report: RowReport | None = None,
    letters: Sequence[str] = (),
) -> Iterator[Piece]:
    """Yields the conversations of a file as pieces of text with spans.

    A record that is no conversation, or that the template does not take, goes into `report`, or raises without one.
    `letters` are special tokens that are only letters in messages, as `vocabulary.letters` lists them.
    """
    with TemplateProcess(format, letters=letters) as process:
        make = functools.partial(_render_conversation, process, report)
        for (piece,) in text_files.read_rows(path, make, advance, report):
            yield piece


def _render_conversation(process: TemplateProcess, report: RowReport | None, record, location: str) -> tuple[Piece]:
    """Returns a conversation as a text with spans."""
    conversation = make_conversation(record, location)
    try:
        text, spans = render_with_spans(process, conversation)
    except (RenderError, SpansNotFound) as error:
        raise RowError(location, str(error), error.cause) from None
    if report:
        for change in describe_changes(process, conversation):
            report.add_change(change, location)
    return (Piece(text, spans=tuple(spans), key=conversation.words),)


def describe_changes(process: TemplateProcess, conversation: Conversation) -> Iterator[str]:
    """Yields the differences of what is learned from the record."""
    yield from conversation.changes
    if process.format.ignores_tools(conversation.tools):
        yield f"tools are left out: the chat template of {process.format.name} does not read them"


def mask_tokens(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Returns 1 for every token that contains a character of a span; offsets: [tokens, 2], in characters."""
    mask = np.zeros(len(offsets), np.uint8)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        inside = np.flatnonzero((ends > start) & (starts < end))
        if inside.size:
            mask[inside[0] : inside[-1] + 1] = 1
    return mask
