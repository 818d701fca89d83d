"""Tool calls whose arguments are texts between tags, and DeepSeek's, which have tags around JSON."""

import json
import re
from typing import Any
from urllib.parse import unquote

from shardformer.inference.grammars.json_schema import OF_TYPES
from shardformer.inference.tool_calls.json_calls import Call, make_call, read_value

BAR = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END = (f"<{BAR}tool▁{name}{BAR}>" for name in ("call▁begin", "sep", "call▁end"))
# Version 3 writes function, the name and a block of code; version 3.1 the name and JSON.
DEEPSEEK_HEAD = re.compile(
    rf"\s*{DEEPSEEK_BEGIN}(?:function{DEEPSEEK_SEP}([\w.-]+)\s*```json\s*|([\w.-]+){DEEPSEEK_SEP}\s*)"
)
DEEPSEEK_TAIL = re.compile(rf"\s*(?:```\s*)?{DEEPSEEK_END}\s*")
QWEN_NAME, QWEN_END = re.compile(r"<function=([\w.-]+)>"), "</function>"
# A value ends before another parameter or the end, so that it may have the tag.
QWEN_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")
GLM_PARAMETER = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)
WORDS = {"True": True, "False": False, "None": None}  # templates write them as Python does
PARTS = ("anyOf", "oneOf", "allOf")
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
         type(None): "null"}  # fmt: skip


def parse_deepseek(text: str) -> list[Call]:
    """Returns the calls between DeepSeek's tags; raises ValueError."""
    calls: list[Call] = []
    place = 0
    while place < len(text):
        head = DEEPSEEK_HEAD.match(text, place)
        if not head:
            raise ValueError("expected the name of a function")
        arguments, place = read_value(text, head.end())
        tail = DEEPSEEK_TAIL.match(text, place)
        if not tail:
            raise ValueError("expected the end of a call")
        place = tail.end()
        calls.append(make_call(head[1] or head[2], arguments))
    return calls


def parse_qwen_coder(text: str) -> list[Call]:
    """Returns the call of <function=NAME> and <parameter=NAME>, whose arguments are texts; raises ValueError."""
    text = text.strip()
    match = QWEN_NAME.match(text)
    if not match or not text.endswith(QWEN_END):
        raise ValueError("expected <function=NAME> ... </function>")
    inside = text[match.end() : -len(QWEN_END)].strip()
    return [make_call(match[1], _read_pairs(QWEN_PARAMETER, inside, 0))]


def parse_glm(text: str) -> list[Call]:
    """Returns the call of a name, <arg_key> and <arg_value>, whose arguments are texts; raises ValueError."""
    match = GLM_NAME.match(text)
    if not match:
        raise ValueError("expected the name of a function")
    return [make_call(match[1], _read_pairs(GLM_PARAMETER, text, match.end()))]


def _read_pairs(pattern: re.Pattern[str], text: str, place: int) -> dict[str, str]:
    pairs: dict[str, str] = {}
    while place < len(text):
        match = pattern.match(text, place)
        if not match:
            raise ValueError("expected a parameter")
        pairs[match[1]] = match[2]
        place = match.end()
    return pairs


def read_values(call: Call, schema: dict[str, Any] | None) -> Call:
    """Returns a call whose arguments are texts with the values that they stand for. schema: of the arguments."""
    whole = schema or {}
    properties, others = whole.get("properties"), whole.get("additionalProperties")
    properties = properties if isinstance(properties, dict) else {}
    texts = json.loads(call.arguments)
    values = {name: _read_value(text, properties.get(name, others), whole) for name, text in texts.items()}
    return make_call(call.name, values)


def _read_value(text: str, schema: Any, whole: dict[str, Any]) -> Any:
    """Returns a value of JSON that the schema, a part of the whole one, may allow; else the text."""
    types = _list_types(schema, whole, set())
    if isinstance(schema, dict) and not types:
        return text  # a pattern or a format is one of texts
    try:
        value = WORDS[text] if text in WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = TYPES[type(value)]
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return value if is_allowed or "string" not in types else text


def _list_types(schema: Any, whole: dict[str, Any], followed: set[str]) -> set[str]:
    """Returns the types that a schema and its parts name. followed: references whose types are known, also added to."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if not types and ("enum" in schema or "const" in schema):
        values = schema.get("enum", [schema.get("const")])
        types = {TYPES[type(value)] for value in (values if isinstance(values, list) else [])}
    types = types or {kind for kind, keywords in OF_TYPES.items() if keywords & schema.keys()}
    parts = [part for keyword in PARTS if isinstance(schema.get(keyword), list) for part in schema[keyword]]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        parts.append(_follow(reference, whole))
    return types.union(*(_list_types(part, whole, followed) for part in parts))


def _follow(reference: str, whole: dict[str, Any]) -> Any:
    """Returns the part of a schema that a reference such as #/$defs/city names; None if there is none."""
    part: Any = whole
    for word in reference.removeprefix("#").split("/")[1:]:
        part = part.get(unquote(word).replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part
