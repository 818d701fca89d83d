"""Prompts of conversations, the end of a reply, and the reply alone."""

import dataclasses
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from shardformer.data.chat.chat_format import make_builtin
from shardformer.data.chat.conversations import make_conversation
from shardformer.data.hf_tokenizer import HfTokenizer
from shardformer.data.vocabulary import Bytes
from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec, parse_prompt


@pytest.fixture(scope="module")
def chatml():
    """Returns ChatML with a byte-level tokenizer that has its markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatCodec(HfTokenizer("TEST", tokenizer.to_str()), make_builtin("chatml"), ends=[0])


def test_a_prompt_ends_where_the_assistant_begins(chatml):
    [ids] = chatml.encode_all([parse_prompt("hi")])
    assert chatml.vocabulary.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 256


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ message.content }}", "a\nb"),  # wrote Python's list into the prompt
        ("{{ '' + message.content }}", "a\nb"),  # failed
        ("{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
         "{{ part.text }}{% endfor %}{% endif %}", "ab"),
    ],
)  # fmt: skip
def test_parts_are_joined_unless_the_template_reads_them(chatml, written, expected):
    template = "{% for message in messages %}<|im_start|>" + written + "<|im_end|>{% endfor %}"
    codec = ChatCodec(chatml.vocabulary, dataclasses.replace(make_builtin("chatml"), template=template))
    [ids] = codec.encode_all([make_conversation({"messages": [{"role": "user", "content": PARTS}]}, "x")])
    assert codec.vocabulary.decode(ids) == f"<|im_start|>{expected}<|im_end|>"


def test_a_reply_ends_with_its_turn(chatml):
    assert chatml.ends == {0, 257}
    ids = chatml.vocabulary.encode_with_offsets("it is 😀<|im_end|>")[0].tolist()
    stops = chatml.make_stops()
    assert stops(ids)
    assert not stops(ids[:-1])
    assert not chatml.make_stops(ignore_ends=True)(ids)
    assert chatml.read_reply(ids) == "it is 😀"


def test_a_template_without_markers_ends_a_reply_by_its_text():
    codec = ChatCodec(Bytes(), make_builtin("plain"))
    assert (codec.ends, codec.strings) == (frozenset(), ["\n\n"])
    ids = Bytes().encode("yes.\n\nuser: more").tolist()
    assert codec.make_stops()(Bytes().encode("yes.\n\n").tolist())
    assert codec.read_reply(ids) == "yes."


def test_tools_that_a_template_ignores_are_rejected(chatml):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    conversation = dataclasses.replace(parse_prompt("what time is it?"), tools=tools)
    with pytest.raises(UsageError, match="the chat template of chatml does not read them; leave tools out"):
        chatml.encode_all([conversation])
    with_tools = "{{ tools[0].function.name if tools }}|" + make_builtin("plain").template
    codec = ChatCodec(Bytes(), dataclasses.replace(make_builtin("plain"), template=with_tools))
    assert Bytes().decode(codec.encode_all([conversation])[0]).startswith("clock|user: what time")


@pytest.mark.parametrize("text", ["hi", "[1] is what?", "[not json", '["a"]'])
def test_a_text_is_a_message_of_the_user(text):
    assert parse_prompt(text).messages == [{"role": "user", "content": text}]


def test_a_list_of_messages_is_a_conversation():
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert parse_prompt(json.dumps(messages)).messages == messages


def test_arguments_are_text_for_a_template_that_joins_them():
    said = "(m.tool_calls[0].function.arguments if m.tool_calls else m.content) + '|'"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ {said} }}}}{{% endfor %}}"
    codec = ChatCodec(Bytes(), dataclasses.replace(make_builtin("plain"), template=template))
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    [ids] = codec.encode_all([make_conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "a test")])
    assert Bytes().decode(ids) == 'assistant: {"a": 1}|'
