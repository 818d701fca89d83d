"""A chat with tools is answered by calls, by exactly one if tool_choice asks for it, and by text without them."""

import asyncio
import dataclasses
import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.config.sampling_keys import Sampling
from shardformer.data.chat.chat_format import make_builtin
from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.grammars import call_rules
from shardformer.inference.grammars.call_rules import Function, make_call_rules
from shardformer.inference.grammars.grammar import Automaton
from shardformer.inference.serve.answers import Answer, Choice
from shardformer.inference.serve.jobs import Job, Tokens
from shardformer.inference.serve.request_fields import ApiError, read_fields
from shardformer.inference.serve.request_prompts import Prompt
from shardformer.inference.serve.text_stream import TextStream
from shardformer.inference.serve.tool_choice import read_tools
from tests.data.chat import families
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference.serve.http_server import ask, read_events, send
from tests.inference.serve.test_chat_prompts import as_client, open_service

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + make_builtin("chatml").template
CITY = {"type": "object", "properties": {"c": {"type": "string", "maxLength": 3}}, "required": ["c"]}


def tool(name, parameters=None, **more) -> dict:
    return {"type": "function", "function": {"name": name} | ({"parameters": parameters} if parameters else {}) | more}


TOOLS = [tool("f", CITY), tool("g")]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "seed": 3, "temperature": 3.0}
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def codec():
    return ChatCodec(make_vocabulary(), dataclasses.replace(make_builtin("chatml"), template=TEMPLATE))


@pytest.fixture(scope="module")
def processes():
    """The idle processes of the codec's template, whose start takes longer than a test."""
    idle = []
    yield idle
    for process in idle:
        process.close()


@pytest.fixture
def chat(service, codec, processes, monkeypatch):
    """Lets the server have a template that reads tools; returns its codec."""
    monkeypatch.setattr(service, "chat", codec)
    monkeypatch.setattr(service.prompts, "_processes", processes)
    return codec


def read_call(message) -> tuple[str, dict]:
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("seed", range(3))
def test_required_answer_is_one_call(chat, port, seed):
    (choice,) = ask(port, BODY | {"tool_choice": "required", "seed": seed, "stop": None}, CHAT)["choices"]
    name, arguments = read_call(choice["message"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert len(arguments["c"]) <= 3 if name == "f" else arguments == {}
    events = read_events(port, BODY | {"tool_choice": "required", "seed": seed}, CHAT)
    deltas = [event["choices"][0]["delta"] for event in events]
    [[streamed]] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert streamed["index"] == 0
    assert streamed["function"] == choice["message"]["tool_calls"][0]["function"]
    assert not any(delta.get("content") for delta in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_named_function_is_called(chat, port):
    answer = ask(port, BODY | {"tool_choice": NAMED, "n": 3, "response_format": {"type": "json_object"}}, CHAT)
    assert [read_call(choice["message"]) for choice in answer["choices"]] == [("g", {})] * 3


def test_free_answer_is_text(chat, port):
    for choice in ("auto", "none"):
        message = ask(port, BODY | {"tool_choice": choice, "max_tokens": 8}, CHAT)["choices"][0]["message"]
        assert message["content"]
        assert "tool_calls" not in message


def test_tools_are_left_out_of_a_prompt_without_calls(chat, port):
    counts = [ask(port, BODY | {"tool_choice": choice, "max_tokens": 1}, CHAT)["usage"]["prompt_tokens"]
              for choice in ("auto", "none")]  # fmt: skip
    assert counts[0] == counts[1] + len("fg")


def test_tools_that_a_template_drops_are_rejected(chat, port, service, monkeypatch):
    for template in (
        make_builtin("chatml").template,
        "{% if not tools %}{% endif %}" + make_builtin("chatml").template,
    ):
        format = dataclasses.replace(make_builtin("chatml"), template=template)
        monkeypatch.setattr(service, "chat", ChatCodec(make_vocabulary(), format))
        monkeypatch.setattr(service.prompts, "_processes", [])
        status, content = send(port, CHAT, BODY | {"max_tokens": 1})
        assert status == 400
        assert "does not read them; leave tools out" in content.decode()
        assert send(port, CHAT, BODY | {"max_tokens": 1, "tool_choice": "none"})[0] == 200
        service.prompts.close()


def make_answer(text, parallel=True, ended=True) -> Answer:
    """Returns the answer whose drawn tokens are those of a text, with the template of Qwen2.5."""
    vocabulary = make_vocabulary()
    template = (families.TEMPLATES / "qwen2_5.jinja").read_text("utf-8")
    format = dataclasses.replace(make_builtin("chatml"), template=template)
    fields = read_fields(BODY | {"parallel_tool_calls": parallel}, True)
    tools = read_tools(fields.body, format)
    codec = ChatCodec(vocabulary, format).with_retained(tools.format.special)
    job = Job(0, [1], 0, sampling=Sampling(tokens=999))
    job.ids = vocabulary.encode_with_offsets(text + "<|im_end|>" * ended)[0].tolist()
    job.logprobs, job.stopped = [0.0] * len(job.ids), ended
    stream = TextStream(codec.decode, codec.read_reply, codec.strings, frozenset(codec.ends))
    choice = Choice(job, stream, codec.read_reply, Prompt([]), calls=tools.make_stream())
    return Answer(fields, "m", vocabulary, [choice], True)


CALL = '<tool_call>\n{"name": "f", "arguments": {"c": "ü"}}\n</tool_call>'


def test_calls_of_a_free_answer_are_read():
    (choice,) = make_answer(f"let me see\n{CALL}\n{CALL}").as_object()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("let me see", "tool_calls")
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"c": "ü"}'}] * 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    one = make_answer(f"{CALL}\n{CALL}", parallel=False).as_object()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1


def test_streamed_calls_are_the_same():
    answer = make_answer(f"let me see\n{CALL}\n{CALL}")
    events = [answer.event(0, Tokens([token], [0.0], [])) for token in answer.choices[0].job.ids]
    events = [event["choices"][0]["delta"] for event in events if event]
    assert "".join(delta.get("content", "") for delta in events) == "let me see"
    calls = [call for delta in events for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert answer.last_event(0)["choices"][0] | {"logprobs": 0} == {
        "index": 0, "delta": {}, "logprobs": 0, "finish_reason": "tool_calls"}  # fmt: skip


def test_text_that_is_no_call_stays_content():
    text = f"see {CALL[:-20]}"
    (choice,) = make_answer(text, ended=False).as_object()["choices"]
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": text, "refusal": None},
        "length",
    )
    answer = make_answer(text, ended=False)
    shown = [answer.event(0, Tokens([token], [0.0], [])) for token in answer.choices[0].job.ids]
    pieces = [event["choices"][0]["delta"]["content"] for event in shown if event]
    pieces.append(answer.last_event(0)["choices"][0]["delta"]["content"])
    assert "".join(pieces) == text
    assert pieces[-1] == f" {CALL[:-20]}"


def test_special_tokens_around_a_call_are_retained(tmp_path):
    service, _ = open_service("mistral_nemo", tmp_path)
    vocabulary = service.chat.vocabulary
    ids = vocabulary.encode_with_offsets('[TOOL_CALLS][{"name": "é"}]</s>[INST]')[0].tolist()
    assert service.chat.read_reply(ids) == '[{"name": "é"}]'
    assert service.chat.with_retained(["[TOOL_CALLS]", "{"]).read_reply(ids) == '[TOOL_CALLS][{"name": "é"}]'


def test_forced_prompt_ends_with_the_opening_of_a_call(tmp_path):
    for name, opening in (("mistral_nemo", "[TOOL_CALLS]["), ("qwen3", "<tool_call>\n"), ("llama3_2", "")):
        service, prompts = open_service(name, tmp_path / name)
        record = as_client({"messages": [{"role": "user", "content": "hi"}], "tools": [families.TOOL]})
        for choice in ("auto", "required"):
            asyncio.run(service.start(json.dumps(record | {"tool_choice": choice}).encode(), chat=True))
        texts = [service.codec.vocabulary.decode(prompt) for prompt in prompts]
        assert texts[1] == texts[0] + opening
        service.close()


def test_messages_of_calls_are_part_of_the_prompt(tmp_path):
    service, prompts = open_service("qwen2_5", tmp_path)
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdefgh1", "content": "rain"}]  # fmt: skip
    asyncio.run(service.start(json.dumps({"messages": messages, "tools": [families.TOOL]}).encode(), chat=True))
    text = service.codec.vocabulary.decode(prompts[0])
    assert '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    service.close()


WRONG = [
    ({"tools": "x"}, "tools", "expected a list"),
    ({"tools": [1]}, "tools", "tools has 1 at 0"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "with a name of at most 64"),
    ({"tools": [tool("a b")]}, "tools", "with a name of at most 64"),
    ({"tools": [tool("\ud800")]}, "tools", "with a name of at most 64"),
    ({"tools": [tool("f")] * 129}, "tools", "at most 128"),
    ({"tools": [tool("f", parameters=3)]}, "parameters", "expected an object"),
    ({"tool_choice": "any"}, "tool_choice", "expected none, auto, required"),
    ({"tool_choice": {"type": "function", "function": {"name": []}}}, "tool_choice", "expected none, auto, required"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "there are f, g"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "there are none"),
    ({"tool_choice": NAMED, "tools": None}, "tool_choice", "there are none"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"response_format": {"type": "json_object"}}, "response_format", "give tool_choice=none or required"),
    ({"tool_choice": "required", "tools": [tool("f", {"pattern": "a"}, strict=True)]}, "tools", "keyword 'pattern'"),
    ({"tool_choice": "required", "tools": [tool("f", {"$ref": "#"}, strict=True)]}, "tools", "may be no object"),
    ({"tool_choice": "required", "tools": [tool("f", {"type": "string"}, strict=True)]}, "tools", "may be no object"),
    ({"tool_choice": "required", "response_format": {"type": "x"}}, "response_format", "expected text, json_object"),
    ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools", "tools has 'f' twice; give each function once"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_wrong_tools_are_named(chat, port, fields, param, message):
    status, content = send(port, CHAT, BODY | {"max_tokens": 40} | fields)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def accepts(rules, text) -> bool:
    automaton = Automaton(rules)
    return automaton.is_complete(automaton.run(text.encode()))


def test_rules_of_calls_follow_the_schemas():
    refers = {"$defs": {"d": {"enum": [1]}}, "properties": {"x": {"$ref": "#/$defs/d"}}, "required": ["x"]}
    rules = make_call_rules([Function("f", CITY, False), Function("g", None, False), Function("h", refers, True)], "p")
    good = ['{"name": "f", "p": {"c": "abc"}}', ' {"name":"g","p":{}}', '{"name": "h", "p": {"x": 1}}']
    bad = ['{"name": "f", "p": {"c": "abcd"}}', '{"name": "g", "p": {"a": 1}}', '{"name": "h", "p": {"x": 2}}',
           '{"name": "i", "p": {}}', '{"name": "g", "arguments": {}}']  # fmt: skip
    assert [accepts(rules, text) for text in good + bad] == [True] * 3 + [False] * 5


def test_schemas_that_are_not_covered_allow_any_object():
    pattern = {"properties": {"a": {"pattern": "b"}}}
    rules = make_call_rules([Function("f", pattern, False)], "arguments")
    assert accepts(rules, '{"name": "f", "arguments": {"a": 3}}')
    assert not accepts(rules, '{"name": "f", "arguments": 3}')
    with pytest.raises(UsageError, match="the parameters of tool f: the keyword 'pattern'"):
        make_call_rules([Function("f", pattern, True)], "arguments")


@pytest.mark.parametrize(
    "schema",
    [{"title": "A"}, {"type": "string"}, {"type": ["object", "null"]}, {"anyOf": [{"type": "object"}, {"const": 5}]},
     {"const": 5}, {"type": "object", "enum": [5]}],
    ids=str,
)  # fmt: skip
def test_arguments_are_always_an_object(schema):
    rules = make_call_rules([Function("f", schema, False)], "arguments")
    assert accepts(rules, '{"name": "f", "arguments": {}}')
    for value in ("5", '"a"', "null"):
        assert not accepts(rules, f'{{"name": "f", "arguments": {value}}}')


@pytest.mark.parametrize("is_strict", [False, True])
def test_tool_without_possible_arguments_is_named(is_strict):
    """Only the others could be called, and nobody was told."""
    endless = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(UsageError, match="the parameters of tool f have no finite text"):
        make_call_rules([Function("f", endless, is_strict), Function("g", None, False)], "arguments")


def test_too_large_schema_is_rejected_before_the_next_one(monkeypatch):
    """It became any object, after as many rules had been made as all tools may have."""
    made: list[str] = []
    make = call_rules.make_rules
    monkeypatch.setattr(call_rules, "make_rules", lambda *args: made.append(args[1]) or make(*args))
    huge = {"properties": {f"p{n}": {"type": "string", "maxLength": 1000} for n in range(60)}}
    with pytest.raises(UsageError, match="too large schemas"):
        make_call_rules([Function(name, huge, False) for name in "fg"], "arguments")
    assert len(made) == 1


def test_rules_of_all_tools_are_bounded():
    long = {"properties": {"a": {"type": "string", "maxLength": 1000}, "b": {"type": "string", "maxLength": 1000}}}
    with pytest.raises(UsageError, match="too large schemas"):
        make_call_rules([Function(f"f{n}", long, False) for n in range(40)], "arguments")


def test_completions_have_no_tools():
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        with pytest.raises(ApiError, match="not a field"):
            read_fields({"prompt": "a", name: "none"}, False)
