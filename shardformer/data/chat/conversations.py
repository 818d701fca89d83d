"""The records of chat data: `messages` as OpenAI writes them, or `conversations` as ShareGPT does."""

import dataclasses
import json
from typing import Any

from shardformer.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
FROM_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first two


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of roles and contents, the tools that they may call, and further variables of the template."""

    messages: list[dict]
    tools: list | None = None
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def words(self) -> str:
        """The text of users and assistants, which tells conversations apart: many share a system message."""
        told = [message for message in self.messages if message["role"] in ("user", "assistant")]
        return "\n".join(_join_parts(message.get("content")) for message in told)


def is_chat_record(record, field: str) -> bool:
    """Returns whether a record of a .jsonl file is a conversation; a record with the text's field is none."""
    if not isinstance(record, dict) or field in record:
        return False
    return any(isinstance(record.get(name), list) for name in ("messages", "conversations"))


def parse_conversation(line: bytes, place: str) -> Conversation:
    """Parses a line of a .jsonl file; raises UsageError that names `place`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}, is not JSON: {error}") from None
    return make_conversation(record, place)


def make_conversation(record, place: str) -> Conversation:
    """Checks a record; raises UsageError that names what is wrong in it."""
    if not isinstance(record, dict) or not is_chat_record(record, ""):
        raise UsageError(f"{place}, is not a conversation: expected an object with a list of messages or conversations")
    if isinstance(record.get("messages"), list):
        messages = [_check_message(message, f"{place}, message {n}") for n, message in enumerate(record["messages"], 1)]
    else:
        messages = [_from_sharegpt(turn, f"{place}, turn {n}") for n, turn in enumerate(record["conversations"], 1)]
    if not messages:
        raise UsageError(f"{place}, has no messages; remove the line")
    return Conversation(messages, _read_tools(record.get("tools"), place), _read_options(record, place))


def _check_message(message, place: str) -> dict:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise UsageError(f"{place}, has the role {role!r:.50}; expected {', '.join(ROLES)}")
    if message.get("weight", 1) != 1:
        raise UsageError(f"{place}, has weight={message['weight']!r:.50}, which is not read; leave the turn out")
    if not _is_content(message.get("content"), "tool_calls" in message):
        raise UsageError(
            f"{place}, has a content of {type(message.get('content')).__name__}; expected text, or a list of parts "
            "with type text"
        )
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:  # as transformers names it for templates
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _is_content(content, calls_tools: bool) -> bool:
    if content is None:
        return calls_tools
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str)


def _from_sharegpt(turn, place: str) -> dict:
    role = FROM_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        got = {name: turn.get(name) for name in ("from", "value")} if isinstance(turn, dict) else turn
        raise UsageError(f"{place}, is {got!r:.80}; expected a value of text, from {', '.join(FROM_ROLES)}")
    return {"role": role, "content": turn["value"]}


def _read_tools(tools: Any, place: str) -> list | None:
    """Returns the tools, which some data sets keep as the text of a JSON list."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise UsageError(f"{place}, has tools that are not JSON: {tools!r:.80}") from None
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"{place}, has tools of {type(tools).__name__}; expected a list of JSON schemas")
    return tools


def _read_options(record: dict, place: str) -> dict:
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise UsageError(f"{place}, has chat_template_kwargs of {type(options).__name__}; expected an object")
    return options


def _join_parts(content) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
