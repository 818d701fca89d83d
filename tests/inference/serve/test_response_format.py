"""An answer in a form parses, whatever the model would write and however few tokens it may have."""

import concurrent.futures
import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.data import Characters
from shardformer.data.chat.chat_format import make_builtin
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.grammars.json_rules import JSON_OBJECT
from shardformer.inference.serve import response_format
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.response_format import Form, Forms
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference.serve.http_server import ask, read_events, send

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["a", "ab", 3]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
BODY = {"prompt": "to be", "max_tokens": 60, "temperature": 3.0, "response_format": {"type": "json_object"}}
ASCII = "".join(map(chr, range(128)))
CHAT = "/v1/chat/completions"


def as_chat(body):
    body = body | {"messages": [{"role": "user", "content": "hi"}]}
    return {name: value for name, value in body.items() if name != "prompt"}


@pytest.mark.parametrize("tokens", [2, 5, 60])
def test_any_object_parses(port, tokens):
    answer = ask(port, BODY | {"n": 4, "seed": tokens, "max_tokens": tokens})
    objects = [json.loads(choice["text"]) for choice in answer["choices"]]
    assert all(isinstance(value, dict) for value in objects)
    free = ask(port, BODY | {"n": 4, "seed": tokens, "response_format": {"type": "text"}})
    assert not any(choice["text"].lstrip().startswith("{") for choice in free["choices"])


@pytest.mark.parametrize("tokens", [12, 60])
def test_objects_follow_their_schema(port, tokens):
    body = as_chat(BODY | {"n": 4, "seed": 1, "max_tokens": tokens, "response_format": BY_SCHEMA})
    for choice in ask(port, body, CHAT)["choices"]:
        value = json.loads(choice["message"]["content"])
        assert value["kind"] in ["a", "ab", 3]
        assert len(value.get("name", "")) <= 4
        assert value.keys() <= SCHEMA["properties"].keys()


def test_forms_do_not_depend_on_other_requests(port):
    """Requests of other forms, and without one, share the steps of the engine."""
    formats = [BY_SCHEMA, {"type": "json_object", "schema": None}, {"type": "text"}]
    bodies = [BODY | {"seed": i, "logprobs": 1, "response_format": formats[i % 3]} for i in range(9)]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda body: ask(port, body)["choices"], bodies))
    assert together == [ask(port, body)["choices"] for body in bodies]
    assert len({json.dumps(choices) for choices in together}) == 9


def test_streamed_object_is_the_same(port):
    body = as_chat(BODY | {"seed": 3})
    whole = ask(port, body, CHAT)["choices"][0]
    events = read_events(port, body, CHAT)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole["message"]["content"]
    assert json.loads(whole["message"]["content"]) is not None


def test_string_that_ends_a_turn_does_not_cut_an_object(port, service, monkeypatch):
    monkeypatch.setattr(service, "chat", ChatCodec(make_vocabulary(), make_builtin("chatml"), stops=["{", "}"]))
    body = as_chat(BODY | {"seed": 3})
    answer = ask(port, body, CHAT)["choices"][0]["message"]["content"]
    assert isinstance(json.loads(answer), dict)
    streamed = [event["choices"][0]["delta"].get("content", "") for event in read_events(port, body, CHAT)]
    assert "".join(streamed) == answer
    assert ask(port, body | {"stop": "}"}, CHAT)["choices"][0]["message"]["content"] == answer.partition("}")[0]


def test_ambiguous_text_fails_alone(port):
    array = {"type": "array", "items": {"$ref": "#"}}
    form = {"type": "json_schema", "json_schema": {"schema": {"anyOf": [array, array, {"type": "null"}]}}}
    body = BODY | {"response_format": form, "logit_bias": {"[": 100}}
    status, content = send(port, "/v1/completions", body)
    assert status == 400
    assert "more than 2,000 ways" in json.loads(content)["error"]["message"]
    assert isinstance(json.loads(ask(port, BODY)["choices"][0]["text"]), dict)


def test_ends_that_only_the_model_has():
    automaton = Forms(Characters(ASCII)).find("", lambda: JSON_OBJECT)
    form = Form(automaton, frozenset([5, 10**6]), 10)
    assert not form.allow([])[5]
    assert form.allow([ASCII.index("{"), ASCII.index("}")])[5]


def test_characters_of_a_schema_are_tokens():
    forms = Forms(Characters(ASCII + "é"))
    assert forms.read(as_form({"enum": ["aé", "b"], "title": "ü"}))
    with pytest.raises(ApiError, match="no token for 'ü'"):
        forms.read(as_form({"enum": ["aü", "b"]}))


def test_very_long_texts_are_rejected():
    schema = {"type": "null"}
    for _ in range(5):
        schema = {"items": schema, "minItems": 100}
    with pytest.raises(ApiError, match="more than 1,000,000 bytes"):
        Forms(Characters(ASCII)).read(as_form(schema))


def test_schema_of_an_object_is_followed(port):
    """llama.cpp's clients give it without json_schema."""
    form = {"type": "json_object", "schema": {"const": "foo"}}
    assert ask(port, BODY | {"response_format": form})["choices"][0]["text"].strip() == '"foo"'


def test_rules_are_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(response_format, "make_rules", lambda *_: made.append(1) or JSON_OBJECT)
    forms = Forms(Characters(ASCII))
    assert forms.read(as_form({"a": 1})) is forms.read(as_form({"a": 1})) is not forms.read(as_form({"a": 2}))
    assert len(made) == 2


def as_form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("json_object", "expected an object"),
        ({"type": "grammar"}, "expected text, json_object or json_schema"),
        ({"type": []}, "expected text, json_object or json_schema"),
        ({"type": "json_schema"}, "has no schema"),
        ({"type": "json_object", "schema": 123}, "has no schema"),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, "type 'hiccup'"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "a"}}}, "keyword 'pattern'"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "no text is of this form"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}}, "cannot be written"),
    ],
)
def test_wrong_form_is_named(port, form, message):
    status, content = send(port, "/v1/completions", BODY | {"response_format": form})
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, "response_format")
    assert message in error["message"]
