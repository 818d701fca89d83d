"""The records of chat data, and what is rejected in them."""

import json

import pytest

from shardformer.data.chat.conversations import (
    REPLY_FIRST,
    is_chat_record,
    make_conversation,
    with_text_arguments,
)
from shardformer.errors import UsageError

USER = {"role": "user", "content": "hi"}


def parse(**record):
    return make_conversation(record, "chat.jsonl, line 3")


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


def test_arguments_as_text_are_parsed():
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}]
    [_, found] = parse(messages=[USER, {"role": "assistant", "content": None, "tool_calls": calls}]).messages
    assert found["tool_calls"][0]["function"]["arguments"] == {"a": [1, "é"]}
    as_text = with_text_arguments(parse(messages=[USER, {"role": "assistant", "tool_calls": calls}]))
    assert as_text.messages[1]["tool_calls"] == calls


def test_arguments_beside_the_name_and_empty_ones_are_parsed():
    calls = [{"name": "f", "arguments": '{"a": 1}'}, {"function": {"name": "g", "arguments": ""}}]
    [found] = parse(messages=[{"role": "assistant", "tool_calls": calls}]).messages
    assert found["tool_calls"] == [
        {"name": "f", "arguments": {"a": 1}},
        {"function": {"name": "g", "arguments": {}}},
    ]


def test_function_calls_are_tool_calls():
    """OpenAI's first form: templates do not know it, so that an empty turn would be trained on."""
    call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "f", "content": "2"}
    [_, calls, answer] = parse(messages=[USER, call, result]).messages
    assert calls["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert answer == result | {"role": "tool"}
    [_, plain] = parse(messages=[USER, {"role": "assistant", "content": "a", "function_call": None}]).messages
    assert "tool_calls" not in plain


def test_weight_0_is_read_only():
    turn = {"role": "assistant", "content": "a"}
    assert parse(messages=[USER, turn | {"weight": 0}, USER, turn | {"weight": 1}]).unlearned == {1}
    assert parse(messages=[USER | {"weight": 0}, turn]).unlearned == frozenset()


def test_replies_before_the_first_human_turn_are_left_out():
    said = [{"from": name, "value": text} for name, text in (("gpt", "hello"), ("human", "a"), ("gpt", "b"))]
    found = parse(conversations=said)
    assert [message["content"] for message in found.messages] == ["a", "b"]
    assert found.changes == (REPLY_FIRST,)
    system = {"from": "system", "value": "s"}
    assert [m["content"] for m in parse(conversations=[system, *said]).messages] == ["s", "a", "b"]
    assert parse(conversations=said[1:]).changes == ()
    with pytest.raises(UsageError, match="has no messages"):
        parse(conversations=said[:1])


def test_turns_of_conversations_may_have_roles():
    assert parse(conversations=[USER]).messages == [USER]
    assert parse(messages=[{"from": "human", "value": "hi"}]).messages == [USER]


def test_instructions_become_messages():
    record = {"instruction": "Add.", "input": "1", "output": "2", "system": "s", "history": [["q", "a"]]}
    found = parse(**record).messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in found] == ["s", "q", "a", "Add.\n1", "2"]
    dolly = {"instruction": "Add.", "context": "1", "response": "2", "category": "x"}
    assert [message["content"] for message in parse(**dolly).messages] == ["Add.\n1", "2"]


def test_prompt_and_completion_may_be_messages():
    prompt = [USER, {"role": "assistant", "content": "a"}, USER]
    found = parse(prompt=prompt, completion=[{"role": "assistant", "content": "b"}])
    assert (len(found.messages), found.unlearned) == (4, {1})
    assert not is_chat_record({"prompt": "a", "completion": "b"}, "text")
    with pytest.raises(UsageError, match="a completion of str beside messages; give both as messages, or both as text"):
        parse(prompt=prompt, completion="b")


def test_tools_may_be_text():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(messages=[USER], tools=json.dumps(tools)).tools == tools
    assert parse(messages=[USER], tools=[]).tools is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "line 3, has no messages"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 1, has the role 'bot'; expected system, developer, user",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2, has no content; expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1, has a content of list"),
        ({"messages": [{**USER, "weight": 0.5}]}, "message 1, has weight=0.5; expected 0 or 1"),
        ({"messages": "hi"}, "is not a conversation"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "that are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": "{}"}]}]}, "a tool call without a name"),
        ({"instruction": "a", "output": "b", "input": 3}, "has a field input of int"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "a history that is not a list of pairs"),
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
