"""The items of a conversation become messages that a chat template reads."""

import pytest

pytest.importorskip("starlette")

from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.responses.input_items import make_messages, read_items

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
MADE = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
REPLY = {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}]}  # fmt: skip


def test_texts_are_messages():
    assert make_messages(read_items({"input": "hi"})) == [{"role": "user", "content": "hi"}]
    assert make_messages(read_items({})) == [{"role": "user", "content": ""}]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "be kind"}, {"type": "message", "role": "user", "content": parts}]
    assert make_messages(items) == [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert make_messages([refusal]) == [{"role": "assistant", "content": "no"}]


def test_calls_join_the_message_before_them():
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]}
    messages = make_messages([{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "r", "summary": []},
                              REPLY, CALL, CALL, output, CALL])  # fmt: skip
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "well", "tool_calls": [MADE, MADE]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": None, "tool_calls": [MADE]},
    ]


def test_items_follow_earlier_messages():
    earlier = [{"role": "assistant", "content": "well"}]
    assert make_messages([CALL], earlier) == [{"role": "assistant", "content": "well", "tool_calls": [MADE]}]
    with pytest.raises(ApiError, match=r"input\[0\]"):  # a number counts only the items that this request gave
        make_messages([{"role": "robot", "content": "a"}], earlier)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "parts of the type input_text",
        ),
        ({"role": "user", "content": [3]}, "expected parts"),
        ({"role": "user", "content": [{"type": ["a"]}]}, "expected parts"),
        ({"role": "user"}, "expected text or a list of parts"),
        ({"role": "robot", "content": "a"}, "has the role 'robot'"),
        ({"role": ["user"], "content": "a"}, "has the role"),
        ({"type": "item_reference", "id": "m"}, "has the type 'item_reference'"),
        ({"id": "m"}, "has the type None"),
        (CALL | {"arguments": {}}, r"input\[0\].arguments is {}; expected text"),
        (CALL | {"call_id": None}, "call_id is None"),
        ({"type": "function_call_output", "call_id": "c1"}, "output is None"),
    ],
)
def test_wrong_item_is_named(item, message):
    with pytest.raises(ApiError, match=message):
        make_messages([item])


@pytest.mark.parametrize("given", [3, ["a"], {"role": "user", "content": "a"}])
def test_input_is_text_or_items(given):
    with pytest.raises(ApiError, match="expected text or a list of items"):
        read_items({"input": given})
