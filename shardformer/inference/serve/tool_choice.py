"""The tools of a chat: which may be called, and whether one must be."""

import re
import secrets
import string
from typing import Any, NamedTuple

from shardformer.data.chat.chat_format import ChatFormat
from shardformer.inference.grammars.call_rules import Function, make_call_rules
from shardformer.inference.grammars.grammar import Rules
from shardformer.inference.serve.call_stream import CallStream
from shardformer.inference.serve.request_fields import ApiError, take
from shardformer.inference.tool_calls.json_calls import Call
from shardformer.inference.tool_calls.tool_formats import JSON_ONLY, ToolFormat, find_format

MOST_TOOLS, NAME = 128, re.compile(r"[\w.-]{1,64}", re.ASCII)  # OpenAI's names have no dots
LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # of an id, as the templates of Mistral need them
FIELD = "tool_choice"


class Tools(NamedTuple):
    """The tools that an answer may call."""

    listed: list[dict[str, Any]]  # for the template
    functions: list[Function]
    format: ToolFormat
    is_forced: bool  # the answer is one call
    most: int | None  # calls of an answer

    @property
    def opening(self) -> str:
        """The first part of a forced answer, which the prompt has."""
        return self.format.forced if self.is_forced else ""

    @property
    def identity(self) -> list:
        """Tells the rules of forced answers apart."""
        return [self.format.arguments, self.functions]

    def make_rules(self) -> Rules:
        """Returns the rules of a forced answer; raises UsageError."""
        return make_call_rules(self.functions, self.format.arguments)

    def make_stream(self) -> CallStream:
        schemas = {function.name: function.parameters for function in self.functions}
        return CallStream(JSON_ONLY if self.is_forced else self.format, schemas, self.most)


def read_tools(body: dict[str, Any], format: ChatFormat) -> Tools | None:
    """Returns the tools that the answer to a chat may call; None if it is a text."""
    listed = take(body, "tools", list, [])
    functions = [_read_tool(tool, n) for n, tool in enumerate(listed)]
    if len(functions) > MOST_TOOLS:
        raise ApiError(400, f"tools has {len(functions):,} entries; expected at most {MOST_TOOLS}", "tools")
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(400, f"tools has {twice!r} twice; give each function once", "tools")
    choice = body.get(FIELD, "auto")
    parallel = take(body, "parallel_tool_calls", bool, True)
    if choice == "none" or (choice == "auto" and not functions):
        return None
    chosen = functions if choice in ("auto", "required") else [f for f in functions if f.name == _read_name(choice)]
    if not chosen:
        known = ", ".join(names)[:200]
        raise ApiError(400, f"{FIELD}={choice!r:.100} is none of the tools; there are {known or 'none'}", FIELD)
    is_forced = choice != "auto"
    if not is_forced and body.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise ApiError(
            400, "response_format is given with tools, of which an answer could have only one; give tool_choice=none "
            "or required", "response_format",
        )  # fmt: skip
    known_format = find_format(format.choose_template(listed))
    return Tools(listed, chosen, known_format, is_forced, None if parallel else 1)


def make_call_id() -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(ID_LENGTH))


def describe_call(call: Call, number: str) -> dict[str, Any]:
    """Returns OpenAI's object of a call. number: its id."""
    return {"id": number, "type": "function", "function": call._asdict()}


def _read_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400, f"{FIELD} is {choice!r:.100}; expected none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}', FIELD,
        )  # fmt: skip
    return function["name"]


def _read_tool(tool: Any, number: int) -> Function:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400, f'tools has {tool!r:.100} at {number}; expected {{"type": "function", "function": {{"name": ...}}}}'
            ", with a name of at most 64 letters, digits, and _.-", "tools",
        )  # fmt: skip
    parameters = take(function, "parameters", dict, None)
    return Function(name, parameters, take(function, "strict", bool, False))
