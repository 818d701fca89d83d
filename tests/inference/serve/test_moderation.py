"""A request for moderation is told that there is no model for it, and never that a text is harmless."""

import pytest

pytest.importorskip("starlette")

from shardformer.inference.serve.moderation import read_moderation
from shardformer.inference.serve.request_fields import ApiError
from tests.inference.serve.http_server import ask
from tests.inference.serve.test_app import CHAT

SCORE = {"model": "m", "policy": {"input": {"mode": "score"}, "output": {"mode": "score"}}}


def test_answer_says_that_nothing_was_assessed(port):
    answer = ask(port, CHAT | {"moderation": SCORE}, "/v1/chat/completions")
    assert {side["type"] for side in answer["moderation"].values()} == {"error"}
    assert "moderation" not in ask(port, CHAT, "/v1/chat/completions")


@pytest.mark.parametrize("side", ["input", "output"])
def test_blocking_is_rejected(side):
    with pytest.raises(ApiError, match=f"block the {side}"):
        read_moderation({"moderation": {"model": "m", "policy": {side: {"mode": "block"}}}})
    assert read_moderation({"moderation": {"model": "m"}})
    assert read_moderation({}) is None
