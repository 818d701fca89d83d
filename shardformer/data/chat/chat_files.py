"""Files of conversations as documents: text, and the spans of it that are learned."""

from collections.abc import Callable, Iterator
from pathlib import Path

from shardformer.data import text_files
from shardformer.data.chat.chat_format import ChatFormat
from shardformer.data.chat.conversations import is_chat_record, parse_conversation
from shardformer.data.chat.spans import render_with_spans
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.data.text_files import Piece
from shardformer.errors import UsageError


def are_chat_files(paths: list[Path], field: str) -> bool:
    """Returns whether files hold conversations, by their first record; raises UsageError for a mixture."""
    records = {path: text_files.peek_record(path) if text_files.holds_records(path) else None for path in paths}
    chats = [path for path, record in records.items() if is_chat_record(record, field)]
    if chats and len(chats) < len(paths):
        other = next(path for path in paths if path not in chats)
        raise UsageError(f"{chats[0]} holds conversations and {other} holds texts; mix them as sources: data=A=1,B=1")
    return bool(chats)


def read_conversations(
    path: Path, format: ChatFormat, advance: Callable[[int], object] = lambda _: None
) -> Iterator[Piece]:
    """Yields the conversations of a file as pieces of text with spans."""
    with TemplateProcess(format) as process:
        for line, place in text_files.read_lines(path, advance):
            conversation = parse_conversation(line, place)
            try:
                text, spans = render_with_spans(process, conversation)
            except UsageError as error:
                raise UsageError(f"{place}: {error}") from None
            yield Piece(text, spans=tuple(spans), key=conversation.words)
