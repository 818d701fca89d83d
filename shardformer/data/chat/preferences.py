"""The records of preference data: a prompt with a chosen and a rejected answer, as texts or as messages.

The prompt is explicit, or implicit: the common beginning of chosen and rejected, as in TRL.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.data import text_files
from shardformer.data.chat.chat_files import describe_changes, mask_tokens
from shardformer.data.chat.chat_format import ChatFormat
from shardformer.data.chat.conversations import Conversation, make_conversation
from shardformer.data.chat.spans import SpansNotFound, render_with_spans
from shardformer.data.chat.template_process import RenderError, TemplateProcess
from shardformer.data.row_report import RowError, RowReport
from shardformer.data.text_files import Piece
from shardformer.errors import UsageError

SIDES = ("chosen", "rejected")
OTHER_FIELDS = ("tools", "chat_template_kwargs")  # of a conversation, for both sides


class Pair(NamedTuple):
    """The two sides of a record: texts with a prompt, or conversations with spans."""

    chosen: Piece
    rejected: Piece


def is_preference_record(record, field: str) -> bool:
    """Returns whether a record is a pair; a record with the text's field is none."""
    return isinstance(record, dict) and field not in record and all(side in record for side in SIDES)


def holds_messages(record) -> bool:
    """Returns whether the sides of a pair are messages, which need a chat template."""
    return isinstance(record, dict) and any(isinstance(record.get(side), list) for side in SIDES)


def are_preference_files(paths: list[Path], field: str) -> bool:
    """Returns whether files hold pairs, by their first record; raises UsageError for a mixture."""
    records = {path: text_files.peek_record(path) for path in paths if text_files.contains_records(path)}
    pairs = [path for path, record in records.items() if is_preference_record(record, field)]
    if pairs and len(pairs) < len(paths):
        other = next(path for path in paths if path not in pairs)
        raise UsageError(f"{pairs[0]} holds preference pairs and {other} does not; name files of one kind")
    forms = {holds_messages(records[path]) for path in pairs}
    if len(forms) > 1:
        raise UsageError(f"data={paths[0]} and other files hold pairs of texts and of messages; name files of one form")
    return bool(pairs)


def read_pairs(
    path: Path,
    format: ChatFormat | None,
    advance: Callable[[int], object] = lambda _: None,
    report: RowReport | None = None,
    letters: Sequence[str] = (),
) -> Iterator[Pair]:
    """Yields the pairs of a file. Without a chat format the sides are texts.

    A record that is no pair, or that the template does not take, goes into `report`, or raises without one.
    `letters` are special tokens that are only letters in messages, as `vocabulary.letters` lists them.
    """
    if format is None:
        yield from text_files.read_rows(path, _make_text_pair, advance, report)
        return
    with TemplateProcess(format, letters=letters) as process:
        yield from text_files.read_rows(path, functools.partial(_render_pair, process, report), advance, report)


def _check_pair(record, location: str) -> None:
    if not is_preference_record(record, ""):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise RowError(
            location,
            f"is not a preference pair (it has: {has[:200]}); expected an object with chosen and rejected, and perhaps "
            "prompt",
            "is not a preference pair",
        )
    if record["chosen"] == record["rejected"]:
        raise RowError(location, "has equal chosen and rejected, which prefers neither", "equal chosen and rejected")


def _make_text_pair(record, location: str) -> Pair:
    """Returns a pair of texts."""
    _check_pair(record, location)
    for name in ("prompt", *SIDES):
        if not isinstance(record.get(name, ""), str):
            kind = type(record[name]).__name__
            raise RowError(
                location, f"has a {name} of {kind}; expected text, as in the first record", f"{name}: {kind}"
            )
    prompt, answers = record.get("prompt"), [record[side] for side in SIDES]
    if prompt is None:
        prompt, answers = _split_common_beginning(*answers)
    for side, answer in zip(SIDES, answers, strict=True):
        if not answer:
            raise RowError(location, f"has an empty {side}, of which nothing is scored", f"an empty {side}")
    return Pair(*(Piece(answer, prompt=prompt, key=prompt or answers[0]) for answer in answers))


def _split_common_beginning(chosen, rejected) -> tuple:
    """Returns (the common beginning, the two rests); a space before the first difference is a part of the rests."""
    length = min(len(chosen), len(rejected))
    common = next((n for n in range(length) if chosen[n] != rejected[n]), length)
    if isinstance(chosen, str) and 0 < common < length and chosen[common - 1] == " ":
        common -= 1
    return chosen[:common], [chosen[common:], rejected[common:]]


def make_conversations(record: dict, location: str) -> tuple[Conversation, Conversation]:
    """Returns the two conversations of a pair of messages; assistants' messages of the prompt are only read.

    With a prompt of text, chosen and rejected are complete conversations, as in UltraFeedback.
    """
    for side in SIDES:
        if not isinstance(record[side], list):
            kind = type(record[side]).__name__
            raise RowError(location, f"has a {side} of {kind}; expected messages, as in the first record")
    prompt, answers = record.get("prompt"), [record[side] for side in SIDES]
    if not isinstance(prompt, list):
        prompt, answers = _split_common_beginning(*answers)
    others = {name: record[name] for name in OTHER_FIELDS if name in record}
    result = []
    for side, answer in zip(SIDES, answers, strict=True):
        if not answer:
            raise RowError(location, f"has no message in {side} after the prompt", f"no message in {side}")
        conversation = make_conversation({"messages": prompt + answer} | others, f"{location}, {side}")
        read_only = frozenset(n for n in conversation.replies if n < len(prompt))
        result.append(dataclasses.replace(conversation, unlearned=conversation.unlearned | read_only))
    return result[0], result[1]


def _render_pair(process: TemplateProcess, report: RowReport | None, record, location: str) -> Pair:
    """Returns a pair of conversations as texts with spans."""
    _check_pair(record, location)
    conversations, sides = make_conversations(record, location), []
    key = _find_key(*conversations)
    for side, conversation in zip(SIDES, conversations, strict=True):
        try:
            text, spans = render_with_spans(process, conversation)
        except (RenderError, SpansNotFound) as error:
            raise RowError(f"{location}, {side}", str(error), error.cause) from None
        if not spans:
            raise RowError(location, f"has no assistant's message in {side} to score", f"nothing to score in {side}")
        sides.append(Piece(text, spans=tuple(spans), key=key))
    if report:
        for change in sorted({change for each in conversations for change in describe_changes(process, each)}):
            report.add_change(change, location)
    return Pair(*sides)


def _find_key(chosen: Conversation, rejected: Conversation) -> str:
    """Returns the text that chooses the split of a pair: pairs of one prompt are in one split."""
    common, _ = _split_common_beginning(chosen.messages, rejected.messages)
    return chosen.replace(common).words or chosen.words


def encode_side(vocabulary, piece: Piece, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of one side, and 1 for every id that is scored.

    A text is encoded by itself, behind its prompt, and ends with the tokenizer's end of text, which is scored.
    """
    if piece.spans is not None:
        ids, offsets = vocabulary.encode_with_offsets(piece.text, name)
        scored = mask_tokens(offsets, piece.spans)
    else:
        texts = [piece.prompt, piece.text] if piece.prompt else [piece.text]
        *prompt, answer = vocabulary.encode_pieces(texts, [True, False][: len(texts)], name)
        end = [] if vocabulary.end_of_text is None else [vocabulary.end_of_text]
        beginning = [] if list(vocabulary.beginning) == end else vocabulary.beginning
        before = np.concatenate([np.array(beginning, np.int32), *prompt])
        ids = np.concatenate([before, answer, np.array(end, np.int32)]).astype(np.int32)
        scored = (np.arange(len(ids)) >= len(before)).astype(np.uint8)
    scored[:1] = 0  # nothing is before the first token
    return ids, scored
