"""Requests of the tests of llama.cpp's server and of vLLM, and the status that both expect.

llama.cpp: tools/server/tests/unit; vLLM: tests/entrypoints/openai. Left out: other endpoints, images, and fields of
these servers only. vLLM also rejects stream_options without stream, which openai's own tests send, and keys of
logit_bias that are texts, which llama.cpp accepts.
"""

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.inference.serve.http_server import ask, read_events, send

TALK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Hey"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
REQUESTS = [
    *((CHAT, {"messages": messages}, 400) for messages in (
        None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}])),
    *((CHAT, {"messages": TALK, "max_tokens": 10, "response_format": form}, status) for form, status in (
        ({"type": "json_object", "schema": {"const": "42"}}, 200),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, 200),
        ({"type": "json_object"}, 200), ({"type": "sound"}, 400), ({"type": "json_object", "schema": 123}, 400),
        ({"type": "json_object", "schema": {"type": 123}}, 400),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, 400))),
    *((RESPONSES, {"input": "Write an example", "max_output_tokens": 10, "text": {"format": form}}, status)
      for form, status in (
        ({"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}, 200), ({"type": "json_object"}, 200),
        ({"type": "text"}, 200), ({"type": "json_schema", "name": "test"}, 400))),
    (CHAT, {"messages": [TALK[0], {"role": "user", "content": [{"type": "text", "text": "What is"},
                                                              {"type": "text", "text": "the best"}]}],
            "max_tokens": 8}, 200),
    (CHAT, {"messages": TALK, "max_tokens": 5, "logprobs": True, "top_logprobs": 10}, 200),
    (CHAT, {"messages": TALK, "max_tokens": 10, "logprobs": True, "top_logprobs": 21}, 400),
    (CHAT, {"messages": TALK, "max_tokens": 5, "logit_bias": {"257": 1.0}}, 200),
    (CHAT, {"messages": TALK, "max_tokens": 5, "logit_bias": {"261": 1.0}}, 400),
    (CHAT, {"messages": TALK, "max_tokens": 5, "logit_bias": {"1": "not_a_number"}}, 400),
    (COMPLETIONS, {"prompt": [999999], "max_tokens": 5}, 400),
    (COMPLETIONS, {"prompt": "I believe the meaning of life is" * 32}, 400),
    (COMPLETIONS, {"prompt": [0, 0, 0], "max_tokens": 5, "logprobs": 5}, 200),
    (COMPLETIONS, {"prompt": [0, 0, 0], "max_tokens": 5, "logprobs": 21}, 400),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 2}, 200),
    ("/v1/embeddings", {"input": []}, 400),
    ("/v1/embeddings", {"input": {"content": "string"}}, 400),
    ("/v1/embeddings", {"input": "This is a test " * 512}, 400),
    ("/v1/embeddings", {"input": [12, 34, 56]}, 200),
    ("/v1/embeddings", {"input": [[12, 34, 56], [12, 34, 56]]}, 200),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status"), REQUESTS)
def test_status_is_that_of_peers(port, path, body, status):
    found, content = send(port, path, body)
    assert found == status, content
    assert ("error" in json.loads(content)) is (status != 200) or path == RESPONSES


def test_events_have_one_id_one_role_and_one_end(port):
    body = {"messages": TALK, "max_tokens": 8, "stream_options": {"include_usage": True}}
    *events, usage = read_events(port, body, CHAT)
    assert len({event["id"] for event in [*events, usage]}) == 1
    choices = [event["choices"][0] for event in events]
    assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
    assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_ids_begin_with_their_kind(port):
    assert ask(port, {"messages": TALK, "max_tokens": 1}, CHAT)["id"].startswith("chatcmpl-")
    response = ask(port, {"input": "hi", "max_output_tokens": 1}, RESPONSES)
    assert response["id"].startswith("resp_")
    assert response["output"][0]["id"].startswith("msg_")
