"""The records of chat data: `messages` as OpenAI writes them, and the other published forms.

These are `conversations` (ShareGPT), `prompt` and `completion` as messages (TRL), and `instruction`, `input` and
`output` (Alpaca; Dolly names them instruction, context and response).
"""

import dataclasses
import json
from typing import Any

from shardformer.data.row_report import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
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
ANSWERS = {"output": "input", "response": "context"}  # of an instruction, and the name of its input
REPLY_FIRST = "turns of gpt before the first human turn are left out, as FastChat does"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of roles and contents, the tools that they may call, and further variables of the template."""

    messages: list[dict]
    tools: list | None = None
    options: dict = dataclasses.field(default_factory=dict)
    unlearned: frozenset[int] = frozenset()  # indices of the assistants' messages that are only read
    changes: tuple[str, ...] = ()  # descriptions of the differences from the record

    @property
    def words(self) -> str:
        """The text of users and assistants, which tells conversations apart: many share a system message."""
        spoken = [message for message in self.messages if message["role"] in ("user", "assistant")]
        return "\n".join(join_parts(message.get("content")) for message in spoken)

    @property
    def replies(self) -> list[int]:
        """The indices of the assistants' messages."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def replace(self, messages: list[dict]) -> "Conversation":
        return dataclasses.replace(self, messages=messages)


def is_chat_record(record, field: str) -> bool:
    """Returns whether a record is a conversation; a record with the text's field is none."""
    if not isinstance(record, dict) or field in record:
        return False
    if any(isinstance(record.get(name), list) for name in ("messages", "conversations")):
        return True
    return _has_prompt_messages(record) or _find_answer(record) is not None


def _has_prompt_messages(record: dict) -> bool:
    return any(isinstance(record.get(name), list) for name in ("prompt", "completion")) and "completion" in record


def _find_answer(record: dict) -> str | None:
    """Returns the name of the answer to an instruction; None for a record of another form."""
    if not isinstance(record.get("instruction"), str):
        return None
    return next((name for name in ANSWERS if isinstance(record.get(name), str)), None)


def make_conversation(record, location: str) -> Conversation:
    """Checks a record; raises RowError that names what is wrong in it."""
    if not isinstance(record, dict) or not is_chat_record(record, ""):
        raise RowError(
            location,
            "is not a conversation: expected an object with a list of messages or conversations, with prompt and "
            "completion as messages, or with instruction and output",
            "is not a conversation",
        )
    read_only: frozenset[int] = frozenset()
    changes: tuple[str, ...] = ()
    if isinstance(record.get("messages"), list):
        messages = _check_messages(record["messages"], location, "message")
    elif isinstance(record.get("conversations"), list):
        messages = _check_messages(record["conversations"], location, "turn")
        if isinstance(record.get("system"), str) and record["system"] and messages[:1] != _system(record["system"]):
            messages = _system(record["system"]) + messages
        if any("from" in turn for turn in record["conversations"]):
            retained = _drop_first_replies(messages)
            messages, changes = retained, (REPLY_FIRST,) if len(retained) < len(messages) else ()
    elif (answer := _find_answer(record)) is not None:
        messages = _from_instruction(record, answer, location)
    else:
        messages, prompts = _from_prompt(record, location)
        read_only = frozenset(range(prompts))
    if not messages:
        raise RowError(location, "has no messages; remove the row", "has no messages")
    weightless = {n for n, message in enumerate(messages) if message.get("weight", 1) == 0}
    unlearned = frozenset(n for n in read_only | weightless if messages[n]["role"] == "assistant")
    tools = _read_tools(record.get("tools"), location)
    return Conversation(messages, tools, _read_options(record, location), unlearned, changes)


def _check_messages(messages: list, location: str, what: str) -> list[dict]:
    result = []
    for n, message in enumerate(messages, 1):
        is_sharegpt = isinstance(message, dict) and "role" not in message and ("from" in message or "value" in message)
        read = _from_sharegpt if is_sharegpt or (what == "turn" and not _has_role(message)) else _check_message
        result.append(read(message, f"{location}, {what} {n}"))
    return result


def _has_role(message) -> bool:
    return isinstance(message, dict) and "role" in message


def _check_message(message, location: str) -> dict:
    message = _rename_functions(message)
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RowError(location, f"has the role {role!r:.50}; expected {', '.join(ROLES)}", f"role {role!r:.50}")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise RowError(location, f"has weight={weight!r:.50}; expected 0 or 1", "a weight that is neither 0 nor 1")
    if not _is_content(message.get("content"), bool(message.get("tool_calls"))):
        content = message.get("content")
        kind = "no content" if content is None else f"a content of {type(content).__name__}"
        raise RowError(location, f"has {kind}; expected text, or a list of parts with type text", kind)
    if message.get("tool_calls"):
        message = message | {"tool_calls": _parse_calls(message["tool_calls"], location)}
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:  # as transformers names it for templates
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _rename_functions(message):
    """Returns a message of OpenAI's first form of tools, function_call and role function, in today's form."""
    if not isinstance(message, dict):
        return message
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
        message = message | {"tool_calls": [{"type": "function", "function": message["function_call"]}]}
    return message | {"role": "tool"} if message.get("role") == "function" else message


def _is_content(content, calls_tools: bool) -> bool:
    if content is None:
        return calls_tools
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str)


def _parse_calls(calls, location: str) -> list[dict]:
    """Returns tool calls whose arguments are objects: OpenAI writes them as the text of JSON, templates encode them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(location, f"has tool_calls of {type(calls).__name__}; expected a list of objects")
    return [_parse_call(call, location) for call in calls]


def _parse_call(call: dict, location: str) -> dict:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(function.get("name"), str):
        raise RowError(location, "has a tool call without a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        problem = f"has arguments of a tool call that are not JSON: {arguments!r:.80}"
        raise RowError(location, problem, "arguments of a tool call that are not JSON") from None
    changed = function | {"arguments": parsed}
    return changed if function is call else call | {"function": changed}


def with_text_arguments(conversation: Conversation) -> Conversation:
    """Returns the conversation with arguments of tool calls as the text of JSON, which some templates join to text."""
    messages = []
    for message in conversation.messages:
        if calls := message.get("tool_calls"):
            message = message | {"tool_calls": [_write_arguments(call) for call in calls]}
        messages.append(message)
    return conversation.replace(messages)


def _write_arguments(call: dict) -> dict:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    if isinstance(function.get("arguments"), dict):
        changed = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return changed if function is call else call | {"function": changed}
    return call


def _from_sharegpt(turn, location: str) -> dict:
    role = FROM_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        got = {name: turn.get(name) for name in ("from", "value")} if isinstance(turn, dict) else turn
        problem = f"is {got!r:.80}; expected a value of text, from {', '.join(FROM_ROLES)}"
        raise RowError(location, problem, "a turn without a known name or without text")
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise RowError(location, f"has weight={weight!r:.50}; expected 0 or 1", "a weight that is neither 0 nor 1")
    return {"role": role, "content": turn["value"]} | ({"weight": weight} if "weight" in turn else {})


def _drop_first_replies(messages: list[dict]) -> list[dict]:
    """Returns the messages without replies to nothing: a system message and the first human turn come first."""
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    return system + rest


def _from_instruction(record: dict, answer: str, location: str) -> list[dict]:
    """Returns the messages of Alpaca's fields: system, history of (question, answer), instruction and input, output."""
    history = record.get("history") or []
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in history):
        raise RowError(location, "has a history that is not a list of pairs of texts")
    given = record.get(ANSWERS[answer]) or ""
    if not isinstance(given, str):
        raise RowError(location, f"has a field {ANSWERS[answer]} of {type(given).__name__}; expected text")
    question = f"{record['instruction']}\n{given}" if given else record["instruction"]
    contents = [text for pair in history for text in pair] + [question, record[answer]]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    system = record.get("system")
    return (_system(system) if isinstance(system, str) and system else []) + messages


def _from_prompt(record: dict, location: str) -> tuple[list[dict], int]:
    """Returns the messages of a prompt and its completion, and how many of them only are the prompt."""
    parts = []
    for name in ("prompt", "completion"):
        if not isinstance(record.get(name), list):
            problem = f"has a {name} of {type(record.get(name)).__name__} beside messages; give both as messages, or "
            raise RowError(location, f"{problem}both as text", "prompt and completion of two forms")
        parts.append(_check_messages(record[name], f"{location}, {name}", "message"))
    return parts[0] + parts[1], len(parts[0])


def _system(text: str) -> list[dict]:
    return [{"role": "system", "content": text}]


def _read_tools(tools: Any, location: str) -> list | None:
    """Returns the tools, which some data sets keep as the text of a JSON list."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise RowError(location, f"has tools that are not JSON: {tools!r:.80}", "tools that are not JSON") from None
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(location, f"has tools of {type(tools).__name__}; expected a list of JSON schemas")
    return tools


def _read_options(record: dict, location: str) -> dict:
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise RowError(location, f"has chat_template_kwargs of {type(options).__name__}; expected an object")
    return options


def join_parts(content) -> str:
    """Returns a content as one text, each part of it in lines of its own."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
