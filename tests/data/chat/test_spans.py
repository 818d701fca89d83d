"""The spans of what assistants write, in templates that do not name them."""

import pytest

from shardformer.data.chat.conversations import make_conversation
from shardformer.data.chat.spans import render_with_spans
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.errors import UsageError
from tests.data.chat.chats import talk, template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Phi-3 does, it closes a conversation only if no turn follows.
CLOSING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# As Qwen3 does, it shows an empty thought in the last turn only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral does, it shows the tools before the last question.
LATE_TOOLS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 %}"
    "[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def learned(text: str, conversation, **tokens) -> list[str]:
    with TemplateProcess(template(text, **tokens)) as process:
        shown, spans = render_with_spans(process, conversation)
    return [shown[start:end] for start, end in spans]


def test_turns_of_chatml():
    assert learned(CHATML, talk("a", "b", "c", "", "d", "é😀\n ")) == ["b<|im_end|>", "<|im_end|>", "é😀\n <|im_end|>"]


def test_equal_turns_are_told_apart():
    assert learned(CHATML, talk("x", "x", "x", "x")) == ["x<|im_end|>"] * 2


def test_a_closing_token_is_learned_in_the_last_turn():
    found = learned(CLOSING, talk("a", "b", "c", "d"), eos_token="<|endoftext|>")
    assert found == ["b<|end|>", "d<|end|>\n<|endoftext|>"]


def test_a_thought_of_the_last_turn_only():
    assert learned(THINKING, talk("a", "b", "c", "")) == ["b<|im_end|>", "<think>\n\n</think>\n\n<|im_end|>"]


def test_tools_before_the_last_question():
    conversation = talk("a", "b", "c", "d", tools=[{"name": "f"}])
    assert learned(LATE_TOOLS, conversation, eos_token="</s>") == [" b</s>", " d</s>"]


def test_a_tool_call_behind_a_prompt_that_changes():
    """As with Mistral, the system message is shown before a last question only, and a header is no part of a prompt."""
    text = (
        "{% set system = messages[0].content %}{% for m in messages[1:] %}{% if m.role == 'user' %}"
        "[INST]{% if loop.last %}{{ system }} {% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].name }}</s>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    conversation = talk("a", "", "c", "d", system="s")
    conversation.messages[2]["tool_calls"] = [{"name": "f"}]
    assert learned(text, conversation) == ["[CALLS]f</s>", "d</s>"]


def test_a_user_at_the_end():
    assert learned(CHATML, talk("a", "b", "c")) == ["b<|im_end|>"]


def test_turns_without_a_marker_keep_their_line_break():
    assert learned("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", talk("a", "b")) == [
        "assistant: b\n"
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for m in messages %}{{ m.content | length }};{% endfor %}{{ messages | length }}", "show it and"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}", "its end of turn differs"),
        ("{% for m in messages | reverse %}<{{ m.content }}>{% endfor %}", "show it and"),
    ],
)
def test_a_template_without_clear_turns_is_rejected(text, reason):
    with pytest.raises(UsageError, match=reason):
        learned(text, talk("a", "b", "c", "d"))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"a": 1}}}]}
CALLING = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or () %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
JOINING = CALLING.replace("{{ c.function.arguments | tojson }}", "{{ ' ' + c.function.arguments }}")
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def messages(*found):
    return make_conversation({"messages": [{"role": "user", "content": "hi"}, *found]}, "a test")


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_template_that_leaves_out_tool_calls_is_rejected(text):
    with pytest.raises(UsageError, match="leaves out the tool call 'find' of message 2, so that an empty turn would"):
        learned(text, messages(CALL))
    assert learned(text, messages({**CALL, "weight": 0})) == []


def test_tool_calls_are_learned():
    assert learned(CALLING, messages(CALL)) == ['find{"a": 1}</s>']


def test_template_that_joins_arguments_gets_their_text():
    assert learned(JOINING, messages(CALL)) == ['find {"a": 1}</s>']


@pytest.mark.parametrize("text", [CALLING, MARKED])
def test_reply_of_weight_0_is_not_learned(text):
    turns = [{"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "b"},
             {"role": "assistant", "content": "c"}]  # fmt: skip
    assert learned(text, messages(*turns)) == ["c</s>"]
    turns[0]["weight"] = 1
    assert learned(text, messages(*turns)) == ["a</s>", "c</s>"]


def test_weights_need_a_block_for_each_reply():
    twice = MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}!{% endgeneration %}")
    assert len(learned(twice, messages({"role": "assistant", "content": "a"}))) == 2
    with pytest.raises(UsageError, match=r"has 2 blocks of \{% generation %\} for 1 replies"):
        learned(twice, messages({"role": "assistant", "content": "a", "weight": 0}))


def test_developer_is_a_system_unless_the_template_knows_it():
    conversation = make_conversation({"messages": [{"role": "developer", "content": "x"}]}, "a test")
    for text, shown in ((CALLING, "<system>x</s>"), (CALLING + "{# developer #}", "<developer>x</s>")):
        with TemplateProcess(template(text)) as process:
            assert process.render(conversation).text == shown
