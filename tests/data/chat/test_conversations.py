"""The records of chat data, and what is rejected in them."""

import json

import pytest

from shardformer.data.chat.conversations import is_chat_record, parse_conversation
from shardformer.errors import UsageError

USER = {"role": "user", "content": "hi"}


def parse(**record):
    return parse_conversation(json.dumps(record).encode(), "chat.jsonl, line 3")


def test_sharegpt_turns_become_messages():
    turns = [("system", "a"), ("human", "b"), ("gpt", "c"), ("observation", "d")]
    found = parse(conversations=[{"from": name, "value": text} for name, text in turns])
    assert found.messages == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d"},
    ]


def test_messages_keep_their_other_fields():
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert parse(messages=[USER, message]).messages == [USER, message]


def test_reasoning_has_the_names_that_templates_read():
    [_, found] = parse(messages=[USER, {"role": "assistant", "content": "a", "reasoning": "r"}]).messages
    assert found["reasoning_content"] == found["thinking"] == "r"


def test_tools_may_be_text():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(messages=[USER], tools=json.dumps(tools)).tools == tools
    assert parse(messages=[USER], tools=[]).tools is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "line 3, has no messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 1, has the role 'bot'; expected system, user"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2, has a content of NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1, has a content of list"),
        ({"messages": [{**USER, "weight": 0}]}, "message 1, has weight=0"),
        ({"messages": "hi"}, "is not a conversation"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "turn 1, is .*expected a value of text"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1, is "),
        ({"messages": [USER], "tools": "{"}, "has tools that are not JSON"),
        ({"messages": [USER], "tools": [3]}, "has tools of list"),
        ({"messages": [USER], "chat_template_kwargs": 3}, "has chat_template_kwargs of int"),
    ],
)
def test_a_wrong_record_is_named(record, message):
    with pytest.raises(UsageError, match=message):
        parse(**record)


def test_a_record_with_the_text_field_is_text():
    assert is_chat_record({"messages": [USER]}, "text")
    assert not is_chat_record({"messages": [USER], "text": "x"}, "text")
    assert not is_chat_record({"messages": "hi"}, "text")
