"""Responses are stored up to a number of bytes; the oldest go first."""

import json

import pytest

pytest.importorskip("starlette")

from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.responses.stored_responses import StoredResponses

ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def add(stored, name, size=100):
    stored.add({"id": name, "output": []}, b"x" * size)


def test_conversation_ends_with_the_output():
    stored, asked = StoredResponses(), {"role": "user", "content": "\ud800"}
    response = {"id": "a", "output": [ANSWER, CALL]}
    stored.add(response, json.dumps([asked]).encode())
    *before, answer = stored.find("a").read_messages()
    assert (before, answer["content"], answer["tool_calls"][0]["id"]) == ([asked], "A", "c")
    assert json.loads(stored.find("a").response) == response


def test_oldest_responses_make_room():
    stored = StoredResponses(300)
    for name in "abcde":
        add(stored, name)
    assert stored.find("e")
    assert stored.find("d")
    for name in "abc":
        with pytest.raises(ApiError, match="is not stored"):
            stored.find(name)


def test_too_large_response_leaves_the_others():
    stored = StoredResponses(1000, 200)
    for name, size in (("a", 100), ("b", 200), ("c", 100)):
        add(stored, name, size)
    assert stored.find("a")
    assert stored.find("c")
    with pytest.raises(ApiError, match="too large"):
        stored.find("b")


def test_removed_response_gives_its_room_back():
    stored = StoredResponses(400)
    for name in "ab":
        add(stored, name)
        stored.remove(name)
    for name in "cd":
        add(stored, name)
    assert stored.find("c")
    with pytest.raises(ApiError, match="is not stored") as caught:
        stored.remove("a")
    assert caught.value.status == 404
