"""Tool calls that are written as JSON."""

import json
import re
from typing import Any, NamedTuple

LONGEST = 1_000_000  # characters of a call: JSON takes up to 60 times as much memory as its text
BETWEEN = re.compile(r"[\s;,]*")  # two calls that are in no list
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


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


def parse_json(text: str) -> list[Call]:
    """Returns the calls of {"name": ..., "arguments": {...}} or "parameters", in lists or not; raises ValueError."""
    calls: list[Call] = []
    decoder, place = json.JSONDecoder(), 0
    while (place := _skip(text, place)) < len(text):
        value, place = decoder.raw_decode(text, place)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise ValueError("expected an object")
            calls.append(make_call(each.get("name"), each.get("arguments", each.get("parameters"))))
    return calls


def parse_mistral(text: str) -> list[Call]:
    """Returns the calls after [TOOL_CALLS]: a list of JSON, or for newer models NAME[ARGS]{...}; raises ValueError."""
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]"):
        named = NAMED.fullmatch(part)
        calls += [make_call(named[1], json.loads(named[2]))] if named else parse_json(part)
    return calls


def _skip(text: str, place: int) -> int:
    match = BETWEEN.match(text, place)
    assert match
    return match.end()
