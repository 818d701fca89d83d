"""The `openai` client reads the server's answers; skipped where it is not installed."""

import dataclasses
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.inference.chat_codec import ChatCodec  # noqa: E402
from tests.inference.serve.http_server import make_service, running  # noqa: E402
from tests.inference.serve.test_app import CHAT, DRAWN  # noqa: E402


@pytest.fixture(scope="module")
def service():
    return make_service()


@pytest.fixture
def template(service, monkeypatch):
    """Lets the server have a chat template that reads tools."""
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + service.chat.format.template
    format = dataclasses.replace(service.chat.format, template=template)
    monkeypatch.setattr(service, "chat", ChatCodec(service.chat.vocabulary, format))
    monkeypatch.setattr(service.prompts, "_processes", [])


@pytest.fixture(scope="module")
def client(service):
    with running(service) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


def test_completions_and_their_stream(client):
    assert [model.id for model in client.models.list()] == ["small"]
    body = DRAWN | {"model": "small", "n": 3, "logprobs": 2}
    whole = client.completions.create(**body)
    texts, values = [""] * 3, [[], [], []]
    for event in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert event.usage == whole.usage
    assert texts == [choice.text for choice in whole.choices]
    assert values == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert len(set(texts)) == 3


def test_chat_and_its_stream(client):
    body = CHAT | {"model": "small", "logprobs": True, "top_logprobs": 2, "n": 3}
    whole = client.chat.completions.create(**body)
    texts = [""] * 3
    for event in client.chat.completions.create(**body, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2


def join(events) -> str:
    return "".join(event.choices[0].text for event in events)


def test_stops_and_characters_of_two_or_more_tokens(client):
    """Every token is a byte, so that the stop string begins in one token and ends in another."""
    body = DRAWN | {"model": "small", "max_tokens": 80}
    texts = [client.completions.create(**body | {"seed": seed}).choices[0].text for seed in range(4)]
    assert join(client.completions.create(**body | {"seed": 0}, stream=True)) == texts[0]
    seed, place = next((seed, i) for seed, text in enumerate(texts) for i, letter in enumerate(text[:-1])
                       if i and "\x80" <= letter < "\N{REPLACEMENT CHARACTER}")  # fmt: skip
    body |= {"seed": seed, "stop": [texts[seed][place : place + 2], "never"]}
    whole = client.completions.create(**body).choices[0]
    assert (whole.text, whole.finish_reason) == (texts[seed].partition(body["stop"][0])[0], "stop")
    assert join(client.completions.create(**body, stream=True)) == whole.text


def test_echo_repeats_and_scores_the_prompt(client):
    body = {"model": "small", "prompt": "é 😀", "max_tokens": 3, "seed": 1, "logprobs": 2, "echo": True}
    whole = client.completions.create(**body).choices[0]
    assert whole.text.startswith("é 😀")
    assert len(whole.logprobs.token_logprobs) == len("é 😀".encode()) + 3
    assert whole.logprobs.token_logprobs[0] is None
    assert join(client.completions.create(**body, stream=True)) == whole.text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_tokens": 999}, "BadRequestError"),
        ({"model": "other"}, "NotFoundError"),
        ({"prompt": 3}, "BadRequestError"),
    ],
)
def test_errors_have_the_types_of_the_client(client, change, error):
    with pytest.raises(getattr(openai, error)) as caught:
        client.completions.create(**DRAWN | {"model": "small"} | change)
    assert caught.value.body["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}}


def test_required_call_and_its_stream(client, template):
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "seed": 1}
    body |= {"tool_choice": "required"}
    (choice,) = client.chat.completions.create(**body).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("f", "tool_calls")
    assert json.loads(call.function.arguments).get("a", 1) in (1, 2)
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == "tool_calls"


RESPONSE = {"model": "small", "input": "hi", "max_output_tokens": 20, "temperature": 1.5, "extra_body": {"seed": 1}}


def test_response_and_its_stream(client):
    whole = client.responses.create(**RESPONSE, instructions="be kind", top_logprobs=2)
    with client.responses.stream(**RESPONSE, instructions="be kind") as stream:
        events = list(stream)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    assert len(texts) > 1
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    assert len(whole.output[0].content[0].logprobs[0].top_logprobs) == 2


def test_response_is_continued_read_and_deleted(client):
    first = client.responses.create(**RESPONSE | {"max_output_tokens": 8})
    second = client.responses.create(**RESPONSE | {"input": "why?"}, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**RESPONSE, previous_response_id=first.id)


def test_function_call_of_a_response(client, template):
    function = {"type": "function", "strict": False, **TOOL["function"]}
    body = RESPONSE | {"tools": [function], "tool_choice": "required", "max_output_tokens": 60}
    (call,) = client.responses.create(**body).output
    assert json.loads(call.arguments).get("a", 1) in (1, 2)
    with client.responses.stream(**body) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    talk = [{"role": "user", "content": "hi"}, streamed.to_dict(),
            {"type": "function_call_output", "call_id": streamed.call_id, "output": "4"}]  # fmt: skip
    assert client.responses.create(**RESPONSE | {"input": talk, "tools": [function]}).output


def test_embeddings(client):
    """The client asks for base64 by default, and decodes it."""
    made = client.embeddings.create(model="small", input=["to be", "or not"])
    plain = client.embeddings.create(model="small", input="or not", encoding_format="float")
    assert made.data[1].embedding == plain.data[0].embedding != made.data[0].embedding
    assert made.usage.prompt_tokens == 11
