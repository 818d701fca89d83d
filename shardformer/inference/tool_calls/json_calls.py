"""Tool calls that are written as JSON."""

import json
import re
from typing import Any, NamedTuple

LONGEST = 1_000_000  # characters of a call: JSON takes up to 60 times as much memory as its text
DECODER = json.JSONDecoder()
BETWEEN = re.compile(r"[\s;,]*")  # two calls that are in no list
MISTRAL = "[TOOL_CALLS]"
NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class OpenString(ValueError):
    """A text that ends inside a string."""


class Call(NamedTuple):
    """A function and its arguments, the JSON text of an object."""

    name: str
    arguments: str


def make_call(name: Any, arguments: Any) -> Call:
    """Returns a call; raises ValueError if the arguments are no object that JSON can have. None and "" mean none."""
    if arguments in (None, ""):
        arguments = {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("expected a name, and arguments that are an object")
    return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def read_value(text: str, place: int) -> tuple[Any, int]:
    """Returns the value of JSON at a position, and the position after it; raises ValueError."""
    try:
        return DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise OpenString(str(error)) from None
        raise


def parse_json(text: str) -> list[Call]:
    """Returns the calls of {"name": ..., "arguments": {...}} or "parameters", in lists or not; raises ValueError."""
    calls: list[Call] = []
    place = 0
    while (place := _skip(text, place)) < len(text):
        found, place = _read_values(text, place)
        calls += found
    return calls


def parse_mistral(text: str) -> list[Call]:
    """Returns the calls after [TOOL_CALLS]: a list of JSON, or for newer models NAME[ARGS]{...}; raises ValueError."""
    calls: list[Call] = []
    place = 0
    while (place := _skip(text, place)) < len(text):
        if text.startswith(MISTRAL, place):
            place += len(MISTRAL)
        elif named := NAMED.match(text, place):
            arguments, place = read_value(text, named.end())
            calls.append(make_call(named[1], arguments))
        else:
            found, place = _read_values(text, place)
            calls += found
    return calls


def _read_values(text: str, place: int) -> tuple[list[Call], int]:
    """Returns the calls of a value of JSON, and the position after it."""
    value, place = read_value(text, place)
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) for each in listed):
        raise ValueError("expected an object")
    return [make_call(each.get("name"), each.get("arguments", each.get("parameters"))) for each in listed], place


def _skip(text: str, place: int) -> int:
    match = BETWEEN.match(text, place)
    assert match
    return match.end()
