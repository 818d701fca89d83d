"""Calls in the published formats: a template chooses its format, and reads back what it writes."""

import contextlib
import dataclasses
import json

import pytest

from shardformer.data.chat.chat_format import ChatFormat, make_builtin
from shardformer.data.chat.conversations import Conversation
from shardformer.data.chat.template_process import TemplateProcess, render_either_form
from shardformer.inference.serve.call_stream import CallStream
from shardformer.inference.tool_calls.json_calls import Call, parse_json, parse_mistral
from shardformer.inference.tool_calls.python_calls import parse_python
from shardformer.inference.tool_calls.tool_formats import FORMATS, JSON_ONLY, find_format
from tests.data.chat import families

OF_TEMPLATES = {"qwen2_5": "hermes", "qwen3": "hermes", "mistral_nemo": "mistral", "llama3_2": "llama", "lfm2_5": "lfm"}
ARGUMENTS = {"city": "Köln 😀", "days": 2, "near": [1.5, None, True], "more": {"a": "b"}}
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


def read_template(name) -> str:
    return (families.TEMPLATES / f"{name}.jinja").read_text("utf-8")


def split(format, text, step=None, most=None):
    """Returns the content and the calls of a text that comes in pieces of `step` characters."""
    stream = CallStream(format, {"weather": SCHEMA, "clock": None}, most)
    pieces = [text[i : i + step] for i in range(0, len(text), step)] if step else [text]
    parts = [part for piece in pieces for part in stream.push(piece)] + stream.push("", ended=True)
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]
    return "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_calls_of_published_templates_are_read_back(name):
    template = read_template(name)
    assert find_format(template) is FORMATS[OF_TEMPLATES[name]]
    tokens = dict(families.FAMILIES[name].tokens)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with TemplateProcess(ChatFormat(name, template, tokens, "2026-01-02")) as process:
        asked = process.render(Conversation(talk[:1], [families.TOOL]), with_prompt=True).text
        whole = render_either_form(lambda talk: process.render(talk).text, Conversation(talk, [families.TOOL]))
    # Some templates write the reply without the header that begins it, or with an empty thought.
    reply = whole[len(asked) :] if whole.startswith(asked) else whole[len(asked.rstrip()) :]
    reply = reply.removesuffix("\n").removesuffix(tokens["eos_token"]).removeprefix("<think>\n\n</think>\n\n")
    for step in (None, 1, 7):
        content, [(called, arguments)] = split(find_format(template), reply, step)
        assert (content, called) == ("", "weather")
        assert arguments == ARGUMENTS


@pytest.mark.parametrize("name", ["gemma2", "phi3_5"])
def test_templates_without_tools_have_no_format(name):
    assert find_format(read_template(name)) is JSON_ONLY
    assert find_format(make_builtin("chatml").template) is JSON_ONLY


HOSTILE = [
    *("[" * 100_000, '{"name":' * 50_000, "[f(" * 50_000, "[f(a=" + "[" * 100_000),
    '{"name": "clock", "arguments": ' + '{"a":' * 50_000,
    *('[{"name": "f", "arguments": {"a": NaN}}]', '{"name": "f", "arguments": {"a": 1e999}}', "[f(a=1e999)]"),
    *("[f(a=" + "9" * 5000 + ")]", '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"),
    *("f[ARGS]", "", "]", "[f(", "[f(a='", '{"name": ["f"], "arguments": {}}', '{"arguments": {}}'),
    *("[1]", "1"),
]


@pytest.mark.parametrize("parse", [parse_json, parse_mistral, parse_python])
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_no_calls(parse, text):
    with contextlib.suppress(ValueError, RecursionError):
        assert parse(text) == []
    format = dataclasses.replace(FORMATS["hermes"], parse=parse)
    whole = f"<tool_call>{text}</tool_call>"
    assert split(format, whole) == (whole, [])
