"""Files of prompts and of documents to score."""

import contextlib
import json
import sys

from shardformer import storage
from shardformer.config import parsing
from shardformer.errors import UsageError
from shardformer.messages import silence

MAX_TEXT = 256 << 20  # characters


def read_prompts(source: str, chat: bool = False, key: str = "prompts") -> list[str]:
    """Returns the prompts of a file that `key` names: one per line, as text or as JSON with a prompt."""
    name = f"{key}={source}"
    content = _read_text(source, name)
    prompts = [_parse_prompt(line, name, i + 1, chat) for i, line in enumerate(content.split("\n")) if line.strip()]
    if not prompts:
        raise UsageError(f"{name} has no prompt; give one per line")
    return prompts


def read_documents(path: str) -> list[str]:
    """Returns the "text" of each line of a .jsonl file; any other file is one document."""
    content = _read_text(path, path)
    if not path.endswith(".jsonl"):
        documents = [content]
    else:
        documents = []
        for number, line in enumerate(content.split("\n"), 1):
            if not line.strip():
                continue
            documents.append(_parse_record(line, "text", f"{path}, line {number}"))
    if not any(documents):
        raise UsageError(f"{path} has no text")
    return documents


def _read_text(source: str, name: str) -> str:
    """Reads a file or a pipe of at most MAX_TEXT characters; "-" is standard input."""
    try:
        with contextlib.nullcontext(sys.stdin) if source == "-" else _open(source) as file:
            content = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None
    if len(content) > MAX_TEXT:
        raise UsageError(f"{name} has more than {MAX_TEXT:,} characters; cut it into several files")
    return content


def _open(source: str):
    with silence():  # standard output is for the records
        return open(storage.local_path(source), encoding="utf-8", newline="")  # line ends are the text's own


def _parse_prompt(line: str, name: str, number: int, chat: bool) -> str:
    """Returns the "prompt" of a line that is a JSON object; any other line is itself a prompt.

    chat: an object may have messages instead, which become a JSON list.
    """
    if not line.startswith("{"):
        return line.rstrip("\r")
    if chat and (messages := _find_messages(line)):
        return messages
    return _parse_record(line, "prompt", f"{name}, line {number}")


def _find_messages(line: str) -> str:
    """Returns the messages of a JSON object as a JSON list; an empty text if it has none."""
    try:
        messages = json.loads(line).get("messages")
    except (ValueError, RecursionError):
        messages = None
    return json.dumps(messages, ensure_ascii=False) if isinstance(messages, list) else ""


def _parse_record(line: str, field: str, location: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise UsageError(f'{location}: expected {{"{field}": "..."}}, got {parsing.shorten(line)}')
    return text
