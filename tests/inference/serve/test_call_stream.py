"""The text of an answer becomes content and calls, in whatever pieces it comes; nothing is lost."""

import time

import pytest

from shardformer.inference.serve.call_stream import CallStream
from shardformer.inference.tool_calls.tool_formats import FORMATS
from tests.inference.tool_calls.test_tool_formats import split

HERMES = '<tool_call>\n{"name": "clock", "arguments": {"zone": "<tool_call>"}}\n</tool_call>'
TEXTS = [  # format, text, content, names of the calls
    ("hermes", f"let me see\n{HERMES}\n{HERMES}", "let me see", ["clock", "clock"]),
    ("hermes", f"{HERMES} done", "done", ["clock"]),
    ("hermes", f"hello {HERMES}\n{HERMES}\n\nworld", "hello world", ["clock", "clock"]),
    ("hermes", f"hello{HERMES}\n\nworld", "hello\n\nworld", ["clock"]),
    ("hermes", f"I write <tool_call> tags. {HERMES}", "I write <tool_call> tags.", ["clock"]),
    ("hermes", f"{HERMES.removesuffix('</tool_call>')}{HERMES}", HERMES.removesuffix("\n</tool_call>"), ["clock"]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", ["clock"]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "", ["clock"]),
    ("hermes", HERMES.removesuffix("</tool_call>"), "", ["clock"]),
    ("hermes", " a < b, and <tool_ca", " a < b, and <tool_ca", []),
    ("hermes", "<tool_call>{bad}</tool_call> x \n", "<tool_call>{bad}</tool_call> x \n", []),
    ("hermes", f"<tool_call>[]</tool_call>{HERMES}", "<tool_call>[]</tool_call>", ["clock"]),
    ("hermes", HERMES.replace("clock", "other"), HERMES.replace("clock", "other"), []),
    ("hermes", '{"name": "clock", "arguments": {}}', '{"name": "clock", "arguments": {}}', []),
    ("llama", '{"name": "clock", "parameters": {}}', "", ["clock"]),
    ("llama", ' {"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}', "",
     ["clock", "weather"]),
    ("llama", 'I call<|python_tag|>{"name": "clock", "parameters": {}}', "I call", ["clock"]),
    ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama", '<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
    ("llama", 'see {"name": "clock", "parameters": {}}', 'see {"name": "clock", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "x"}, {"name": "weather", "arguments": {}}]',
     "", ["clock", "weather"]),
    ("mistral", 'well[TOOL_CALLS]clock[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{}', "well",
     ["clock", "weather"]),
    ("mistral", "[TOOL_CALLS]clock[ARGS]{", "[TOOL_CALLS]clock[ARGS]{", []),
    ("lfm", "<|tool_call_start|>[clock(), weather(city='a\\'b', b=[1, -2.5e3,], c={\"d\": null})]<|tool_call_end|>ok",
     "ok", ["clock", "weather"]),
    ("lfm", "<|tool_call_start|>[clock(a=b)]<|tool_call_end|>", "<|tool_call_start|>[clock(a=b)]<|tool_call_end|>", []),
    ("lfm", "<|tool_call_start|>clock(a='<|tool_call_end|>', b=\"it's\")<|tool_call_end|>ok", "ok", ["clock"]),
    ("nemotron", '<TOOLCALL>[{"name": "clock", "arguments": "{}"}]</TOOLCALL>', "", ["clock"]),
    ("qwen_coder", "so\n<tool_call>\n<function=clock>\n</function>\n</tool_call>", "so", ["clock"]),
    ("qwen_coder", "<tool_call><function=clock><parameter=a></function></tool_call>",
     "<tool_call><function=clock><parameter=a></function></tool_call>", []),
    ("glm", "<tool_call>clock</tool_call>\n<tool_call>weather\n</tool_call>", "", ["clock", "weather"]),
    ("glm", "<tool_call>see it</tool_call>", "<tool_call>see it</tool_call>", []),
    ("nemotron", '<TOOLCALL>[{"name": "clock", "arguments": {"a": "</TOOLCALL>"}}]</TOOLCALL>ok', "ok", ["clock"]),
    ("hermes", HERMES.replace("zone", 'a\\\\\\"</tool_call>') + "ok", "ok", ["clock"]),
    ("hermes", f'<tool_call>{{"a": "b}}</tool_call>{HERMES}', '<tool_call>{"a": "b}</tool_call>', ["clock"]),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {"a": "[TOOL_CALLS]weather[ARGS]{}"}}]', "", ["clock"]),
    ("mistral", '[TOOL_CALLS]clock[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]weather{}', "", ["clock", "weather"]),
]  # fmt: skip


@pytest.mark.parametrize("step", [None, 1, 5])
@pytest.mark.parametrize(("format", "text", "content", "names"), TEXTS)
def test_content_and_calls_are_split(format, text, content, names, step):
    found, calls = split(FORMATS[format], text, step)
    assert (found, [name for name, _ in calls]) == (content, names)


def test_content_is_sent_before_a_call_is_complete():
    stream = CallStream(FORMATS["hermes"], {"clock": None})
    assert stream.push("let me <tool") == ["let me"]
    assert stream.push(" now") == [" <tool now"]
    assert stream.push(" " + HERMES[:-1]) == []
    assert len(stream.push(HERMES[-1])) == 1


def test_content_after_a_text_that_is_no_call_is_sent():
    stream = CallStream(FORMATS["hermes"], {"clock": None})
    assert stream.push('<tool_call>it is 5" </tool_call> Hello') == ['<tool_call>it is 5" </tool_call> Hello']
    assert stream.push('<tool_call>{"a": "</tool_call>') == []  # which may be in a string
    shown, call = stream.push(f'<tool_call>" b {HERMES}')
    assert (shown, call.name) == ('<tool_call>{"a": "</tool_call><tool_call>" b', "clock")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_parts_are_in_their_order(step):
    stream, text = CallStream(FORMATS["hermes"], {"clock": None}), f"A {HERMES} B {HERMES} C"
    parts = [part for i in range(0, len(text), step) for part in stream.push(text[i : i + step])]
    parts += stream.push("", ended=True)
    assert [part if isinstance(part, str) else part.name for part in parts] == ["A", "clock", " B", "clock", " C"]


PIECES = [  # of texts that are no calls
    ("hermes", '<tool_call>\\"</tool_call>'),
    ("hermes", '<tool_call>{"\\"</tool_call>'),
    ("hermes", '<tool_call>{"a": "'),
    ("qwen_coder", "<tool_call><function=f><parameter=a>"),
    ("glm", "<tool_call>f<arg_key>k</arg_key><arg_value></arg_value>"),
    ("mistral", "[TOOL_CALLS]clock{}"),
    ("lfm", "<|tool_call_start|>[clock(a='\\'<|tool_call_end|>"),
]


@pytest.mark.parametrize(("format", "piece"), PIECES)
def test_texts_that_are_no_calls_take_linear_time(format, piece):
    text = piece * (100_000 // len(piece)) + "</function></tool_call> x"
    start = time.process_time()
    assert split(FORMATS[format], text) == (text, [])
    assert time.process_time() - start < 5  # about 0.3; in quadratic time much more


def test_only_so_many_calls_are_returned():
    assert len(split(FORMATS["hermes"], f"{HERMES}{HERMES}", most=1)[1]) == 1
    both = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {}}]'
    assert [name for name, _ in split(FORMATS["mistral"], both, most=1)[1]] == ["clock"]
    assert split(FORMATS["hermes"], f"{HERMES}x{HERMES}{HERMES}", most=2)[0] == "x"
    assert len(split(FORMATS["nemotron"], f"<TOOLCALL>{both[12:]}</TOOLCALL>" * 3, most=1)[1]) == 1
