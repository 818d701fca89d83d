"""A response is the chat that it asks for, in another form; its stream tells the same."""

import dataclasses
import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.data.chat.chat_format import make_builtin
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.serve.jobs import Tokens
from shardformer.inference.serve.request_fields import read_fields
from shardformer.inference.serve.responses.response_answer import ResponseAnswer
from shardformer.inference.serve.responses.response_request import ResponseRequest
from shardformer.inference.serve.responses.stored_responses import StoredResponses
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference.serve.http_server import ask, hold_back, send
from tests.inference.serve.test_app import CHAT as CHAT_BODY
from tests.inference.serve.test_tool_choice import make_answer

CHAT, PATH = "/v1/chat/completions", "/v1/responses"
BODY = {"input": "hi", "max_output_tokens": 12, "seed": 3, "temperature": 3.0}
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + make_builtin("chatml").template
FUNCTION = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}


@pytest.fixture
def tools(service, monkeypatch):
    """Lets the server have a template that reads tools."""
    codec = ChatCodec(make_vocabulary(), dataclasses.replace(make_builtin("chatml"), template=TEMPLATE))
    monkeypatch.setattr(service, "chat", codec)
    monkeypatch.setattr(service.prompts, "_processes", [])


def read_events(port, body) -> list[dict]:
    status, content = send(port, PATH, body | {"stream": True})
    assert status == 200, content
    events = []
    for part in content.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_names(value):
    """Returns a response without what differs in each answer."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {name: without_names(part) for name, part in value.items() if name not in changing}
    return [without_names(part) for part in value] if isinstance(value, list) else value


def get_text(response) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def test_response_is_that_of_the_chat(port):
    choice = ask(port, CHAT_BODY, CHAT)["choices"][0]
    response = ask(port, BODY, PATH)
    assert get_text(response) == choice["message"]["content"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [message] = response["output"]
    assert (message["role"], message["status"]) == ("assistant", "incomplete")
    usage = response["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (12, usage["input_tokens"] + 12)
    assert response["temperature"] == 3.0
    with_system = [{"role": "system", "content": "be kind"}, *CHAT_BODY["messages"]]
    expected = ask(port, CHAT_BODY | {"messages": with_system}, CHAT)
    told = ask(port, BODY | {"instructions": "be kind"}, PATH)
    assert get_text(told) == expected["choices"][0]["message"]["content"] != get_text(response)
    assert told["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", range(3))
def test_stream_tells_the_same(port, seed):
    body = BODY | {"seed": seed, "max_output_tokens": 60, "include": ["message.output_text.logprobs"]}
    whole, events = ask(port, body, PATH), read_events(port, body)
    kinds = [event["type"].removeprefix("response.") for event in events if "delta" not in event]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", whole["status"],
    ]  # fmt: skip
    assert without_names(events[-1]["response"]) == without_names(whole)
    deltas = [event for event in events if "delta" in event]
    assert "".join(event["delta"] for event in deltas) == get_text(whole) == events[-4]["text"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert entries == events[-4]["logprobs"] == whole["output"][0]["content"][0]["logprobs"]
    assert len(entries) > 10
    assert {event["item_id"] for event in events if "item_id" in event} == {events[-1]["response"]["output"][0]["id"]}


def test_calls_are_items(port, tools):
    body = BODY | {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60}
    whole = ask(port, body, PATH)
    [call] = whole["output"]
    assert (call["type"], call["name"], whole["status"]) == ("function_call", "f", "completed")
    assert json.loads(call["arguments"])["a"] in (1, 2)
    events = read_events(port, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[2]["item"]["arguments"] == ""
    assert without_names(events[-1]["response"]) == without_names(whole)
    named = ask(port, body | {"tool_choice": {"type": "function", "name": "f"}}, PATH)
    assert without_names(named["output"]) == without_names(whole["output"])
    again = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    assert ask(port, BODY | {"input": [again], "previous_response_id": whole["id"], "max_output_tokens": 1}, PATH)


def test_form_of_the_text_is_kept(port):
    schema = {"type": "object", "properties": {"k": {"enum": ["a", 3]}}, "required": ["k"]}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    response = ask(port, BODY | {"text": {"format": form}, "max_output_tokens": 40}, PATH)
    assert json.loads(get_text(response))["k"] in ("a", 3)
    assert response["text"]["format"] == form


def test_next_response_continues_the_conversation(port):
    first = ask(port, BODY | {"max_output_tokens": 4, "instructions": "be kind"}, PATH)
    second = ask(port, BODY | {"input": "why?", "previous_response_id": first["id"]}, PATH)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": get_text(first)},
            {"role": "user", "content": "why?"}]  # fmt: skip
    expected = ask(port, CHAT_BODY | {"messages": talk}, CHAT)["choices"][0]["message"]["content"]
    assert get_text(second) == expected
    assert second["previous_response_id"] == first["id"]


def test_oldest_turns_are_left_out_if_they_do_not_fit(port):
    turns = [{"role": ("user", "assistant")[n % 2], "content": letter * 9} for n, letter in enumerate("abcde")]
    told = {"instructions": "!", "truncation": "auto"}
    for tokens, first in ((12, 2), (20, 4)):  # more tokens of the answer leave room for fewer turns
        body = BODY | told | {"max_output_tokens": tokens}
        cut, fitting = (ask(port, body | {"input": part}, PATH) for part in (turns, turns[first:]))
        assert get_text(cut) == get_text(fitting)
        assert cut["usage"] == fitting["usage"]
        assert cut["truncation"] == "auto"
    assert send(port, PATH, BODY | {"input": turns, "instructions": "!"})[0] == 400


def test_stored_response_is_read_and_removed(port):
    streamed = read_events(port, BODY)[-1]["response"]
    path = f"{PATH}/{streamed['id']}"
    assert json.loads(send(port, path)[1]) == streamed
    assert send(port, path, method="DELETE")[0] == 200
    assert send(port, path)[0] == 404
    status, content = send(port, PATH, BODY | {"previous_response_id": streamed["id"]})
    assert (status, json.loads(content)["error"]["param"]) == (404, "previous_response_id")
    unstored = ask(port, BODY | {"store": False}, PATH)
    assert send(port, f"{PATH}/{unstored['id']}")[0] == 404


def test_timeout_is_an_event(service, port, monkeypatch):
    answers = []
    hold_back(service, monkeypatch, lambda _: answers)
    monkeypatch.setattr(service.limits, "seconds", 0.1)
    answers.append(read_events(port, BODY))
    last = answers[0][-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "more than 0.1 seconds" in last["response"]["error"]["message"]


WRONG = [
    ({"background": True}, "background", "not computed here; ask without it"),
    ({"conversation": "c"}, "conversation", "give previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "give instructions and input"),
    ({"truncation": "middle"}, "truncation", "leave it out"),
    ({"input": "a" * 200, "truncation": "auto"}, "input", "context, 96"),
    ({"messages": []}, "messages", "not a field"),
    ({"input": [{"role": "robot", "content": ""}]}, "input", "has the role 'robot'"),
    ({"input": "\ud800"}, "input", "input has '\\ud800', half of a character"),
    ({"input": "a" * 200}, "input", "shorten the prompt or max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1 to 10000000"),
    ({"max_output_tokens": 10**8}, "max_output_tokens", "max_output_tokens is 100000000; expected 1 to 10000000"),
    ({"tools": [{"type": "web_search"}]}, "tools", "expected the type function"),
    ({"tools": [{"type": "function"}]}, "tools", "with a name of at most 64"),
    ({"tool_choice": {"type": "function", "name": "h"}}, "tool_choice", "is none of the tools"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format has no schema"),
    ({"include": ["all"]}, "include", "include has 'all'"),
    ({"metadata": {"a": 1}}, "metadata", "expected at most 16 texts"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "expected at most 16 texts"),
    ({"reasoning": {"effort": 3}}, "effort", "expected text"),
    ({"input": [], "instructions": None}, "input", "input has no message; give text"),
    ({"instructions": "\ud800"}, "instructions", "instructions has '\\ud800', half"),
    ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"store": 1}, "store", "true or false"),
]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"type": "reasoning", "a": "DEEP"}], "instructions": "a"},
        {"reasoning": {"a": "DEEP"}},
        {"text": {"a": "DEEP"}},
    ],
)
def test_deep_values_are_no_failure_of_the_server(port, fields):
    text = json.dumps(BODY | fields | {"max_output_tokens": 1})
    for depth in (100, 600, 800, 900, 940, 960, 980, 5000):
        status, content = send(port, PATH, text.replace('"DEEP"', "[" * depth + "]" * depth).encode())
        assert status in (200, 400), content
        assert depth > 100 or status == 200


def test_reasoning_is_not_stored(port, service):
    body = BODY | {"input": [{"type": "reasoning", "summary": ["secret"]}, {"role": "user", "content": "hi"}]}
    stored = service.responses.find(ask(port, body, PATH)["id"])
    assert json.loads(stored.messages) == [{"role": "user", "content": "hi"}]


def test_items_are_those_of_the_text_with_its_logprobs():
    outputs = []
    for step in (1, 7, 1000):
        choice = make_answer('A<tool_call>{"name": "f", "arguments": {}}</tool_call>B').choices[0]
        fields, request = read_fields(CHAT_BODY | {"logprobs": True}, True), ResponseRequest({}, {}, b"[]")
        answer = ResponseAnswer(request, fields, "m", choice, make_vocabulary(), StoredResponses())
        ids = choice.job.ids
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            answer.add(0, Tokens(part, [0.0] * len(part), [[]] * len(part)))
        outputs.append(without_names(answer.as_object()["output"]))
    first, call, last = outputs[0]
    assert outputs == [outputs[0]] * 3
    assert call["name"] == "f"
    spelled = [[entry["token"] for entry in item["content"][0]["logprobs"]] for item in (first, last)]
    assert spelled == [["A"], ["B"]]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_wrong_field_is_named(port, fields, param, message):
    status, content = send(port, PATH, BODY | fields)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_fields_that_change_nothing_are_accepted(port):
    same = {"background": False, "truncation": "disabled", "context_management": [], "max_tool_calls": 0,
            "include": ["file_search_call.results"], "reasoning": {"effort": "none", "summary": "auto"},
            "metadata": {"foo": "bar"}, "service_tier": "auto", "stream_options": {"include_obfuscation": True},
            "user": "u", "prompt_cache_key": "p", "text": {"verbosity": "low"}}  # fmt: skip
    response = ask(port, BODY | same, PATH)
    assert get_text(response) == get_text(ask(port, BODY, PATH))
    assert (response["metadata"], response["user"]) == ({"foo": "bar"}, "u")
    assert ask(port, {"max_output_tokens": 1}, PATH)["output"]
