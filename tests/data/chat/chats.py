"""Conversations, tokenizers and formats of the tests of chat data."""

import json
from pathlib import Path

from shardformer.data.chat.chat_format import ChatFormat, make_builtin
from shardformer.data.chat.conversations import Conversation, make_conversation

PLAIN = make_builtin("plain")
CHATML = make_builtin("chatml")


def talk(*contents: str, system: str = "", **others) -> Conversation:
    """Returns a conversation of alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return make_conversation({"messages": messages, **others}, "a test")


def template(text: str, **tokens: str) -> ChatFormat:
    return ChatFormat("TEST", text, tokens, "2026-01-02")


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def records(count: int = 60) -> list[dict]:
    """Returns conversations of two to six messages with different contents."""
    found = []
    for n in range(count):
        turns = [(f"what is {n + k} and {k}?", f"it is {n + 2 * k} 😀") for k in range(1 + n % 3)]
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]
        found.append({"messages": messages})
    return found


ROLES = ("user", "assistant")
