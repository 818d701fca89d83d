"""Responses are stored up to a number of bytes; the oldest go first."""

import pytest

pytest.importorskip("starlette")

from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.responses.stored_responses import StoredResponses


def add(stored, name, size=100):
    stored.add({"id": name, "output": [name]}, ["x" * size])


def test_conversation_ends_with_the_output():
    stored = StoredResponses()
    add(stored, "a", 1)
    assert stored.find("a").conversation == ["x", "a"]
    assert stored.find("a").response["id"] == "a"


def test_oldest_responses_make_room():
    stored = StoredResponses(400)
    for name in "abcde":
        add(stored, name)
    assert stored.find("e")
    assert stored.find("d")
    for name in "abc":
        with pytest.raises(ApiError, match="is not stored"):
            stored.find(name)
    add(stored, "f", 10_000)  # fits in no case
    add(stored, "g")
    assert stored.find("g")


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
