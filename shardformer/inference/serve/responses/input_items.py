"""The items of a conversation in /v1/responses as the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from shardformer.inference.serve.request_fields import ApiError

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # fields of parts
ROLES = ("user", "assistant", "system", "developer")


def read_items(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the items of a request's input: a text is a message of the user."""
    given = body.get("input", "")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ApiError(400, f"input is {given!r:.60}; expected text or a list of items", "input")
    return given


def make_messages(items: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Returns earlier messages and those of items; calls become a part of the assistant's message before them."""
    messages = list(earlier)
    for n, item in enumerate(items):
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            messages.append(_read_message(item, n))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_read_call(item, n))
        elif kind == "function_call_output":
            content = _join_texts(item.get("output"), f"input[{n}].output")
            messages.append({"role": "tool", "tool_call_id": _take_text(item, "call_id", n), "content": content})
        elif kind != "reasoning":  # only the model that wrote it could read it
            raise ApiError(
                400, f"input[{n}] has the type {kind!r:.60}; expected message, function_call, function_call_output or "
                "reasoning", f"input[{n}].type",
            )  # fmt: skip
    return messages


def _read_message(item: dict[str, Any], number: int) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"input[{number}] has the role {role!r:.60}; expected {', '.join(ROLES)}", "input")
    return {"role": role, "content": _join_texts(item.get("content"), f"input[{number}].content")}


def _read_call(item: dict[str, Any], number: int) -> dict[str, Any]:
    function = {name: _take_text(item, name, number) for name in ("name", "arguments")}
    return {"id": _take_text(item, "call_id", number), "type": "function", "function": function}


def _take_text(item: dict[str, Any], name: str, number: int) -> str:
    location = f"input[{number}].{name}"
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"{location} is {item.get(name)!r:.60}; expected text", location)
    return item[name]


def _join_texts(content: Any, location: str) -> str:
    """Returns the text of a content: a text, or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{location} is {content!r:.60}; expected text or a list of parts", location)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            raise ApiError(400, f"{location} has {part!r:.60}; expected parts of the type input_text", location)
        texts.append(text)
    return "\n".join(texts)  # as in a chat
