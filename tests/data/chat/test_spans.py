"""The spans of what assistants write, in templates that do not name them."""

import contextlib
import random

import pytest

from shardformer.data.chat import spans, template_worker
from shardformer.data.chat.conversations import make_conversation
from shardformer.data.chat.letters import make_guard
from shardformer.data.chat.spans import render_with_spans
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.errors import UsageError
from tests.data.chat import families
from tests.data.chat.chats import talk, template
from tests.surroundings import before_call

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
NUMBERED = THINKING.replace("{{ m.content }}", "{{ loop.index }}{{ m.content }}{{ loop.index }}")  # no two look alike
# As Mistral does, it shows the tools before the last question.
LATE_TOOLS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 %}"
    "[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def learned(text: str, conversation, **tokens) -> list[str]:
    shown, spans = render_with_spans(InProcess(text, **tokens), conversation)
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


def insert(text: str) -> str:
    """Returns the template with text at the start of each turn."""
    return CHATML.replace("{{ m.role", text + "{{ m.role")


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WATCHED = {
    "chatml": (CHATML, True),
    "closing": (CLOSING, True),
    "slices": ("{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}" + CHATML, True),
    "filtered loop": (CHATML.replace("in messages", "in messages if m.content != 'skipped'"), True),
    "skipped turns": (insert("{% if loop.index0 == 1 %}{% continue %}{% endif %}"), True),
    "previous message": (insert("{{ messages[loop.index0 - 1].role if loop.index0 }}"), True),
    "next message": (insert("{{ (messages[loop.index0 + 1] or {}).role }}"), False),
    "last message": (insert("{{ loop.last }}"), False),
    "next of the loop": (insert("{{ (loop.nextitem or {}).role }}"), False),
    "number": ("{{ messages | length }}" + CHATML, False),
    "number of the loop": (insert("{{ loop.length }}"), False),
    "from the end": ("{{ messages[-1].role }}" + CHATML, False),
    "reversed": ("{% for m in messages[::-1] %}{% set x = m %}{% endfor %}" + CHATML, False),
    "two loops": ("{% for m in messages %}{{ m.role }}{% endfor %}" + CHATML, False),
    "prompt in the loop": (insert("{{ add_generation_prompt }}"), False),
    "state at the end": ("{% set n = namespace(x='') %}" + insert("{% set n.x = m.role %}")
                         + "{{ n.x }}", False),
    "messages at the end": (CHATML + "{{ messages[0].role }}", False),
    "macro at the end": ("{% macro f() %}{{ messages | length }}{% endmacro %}" + CHATML + "{{ f() }}", False),
    "tail of a break": (insert("{% if loop.index0 == 3 %}{% break %}{% endif %}"), False),
    "printed": ("{{ messages | string | length }}" + CHATML, False),
    "compared": ("{{ messages == [] }}" + CHATML, False),
    "added": ("{% for m in messages + [] %}{{ m.role }}{% endfor %}" + CHATML, False),
    "method": ("{{ messages.count is defined }}" + CHATML, False),
    "macro": ("{% macro f(messages) %}" + CHATML + "{% endmacro %}{{ f(messages) }}", False),
    "condition": ("{% if true %}" + CHATML + "{% endif %}", False),
}  # fmt: skip


class NoLimits:
    """The worker's limits are those of its process."""

    characters = 1 << 20

    def timed(self):
        return contextlib.nullcontext()


def measure(text: str, conversation, monkeypatch, watched: bool = True) -> tuple[list[int | None], int]:
    """Returns the lengths of all prefixes, with and without a prompt, and the number of renderings."""
    environment, calls = template_worker.make_environment(""), []
    plain, loop = template_worker._compile(environment, text)
    prefixes = [(n, prompt) for n in range(len(conversation.messages) + 1) for prompt in (False, True)]
    request = {"messages": conversation.messages, "options": {}, "tools": conversation.tools, "renders": prefixes,
               "measured": "all"}  # fmt: skip
    rendered = template_worker.Conversation(plain, loop if watched else None, TOKENS, request, NoLimits())
    with monkeypatch.context() as patch:
        before_call(patch, template_worker, "render", lambda *_: calls.append(1))
        return rendered.measure_prefixes()["prefixes"], len(calls)


@pytest.mark.parametrize("name", WATCHED)
def test_watched_loop_measures_as_each_rendering(name, monkeypatch):
    text, is_shared = WATCHED[name]
    conversation = talk("a", "b", "skipped", "d", "e", "f")
    expected, renderings = measure(text, conversation, monkeypatch, watched=False)
    lengths, fewer = measure(text, conversation, monkeypatch)
    assert lengths == expected
    assert renderings == 15
    assert (fewer < 9) == is_shared


@pytest.mark.parametrize("name", sorted(path.stem for path in families.TEMPLATES.glob("*.jinja")))
def test_published_template_measures_as_each_rendering(name, monkeypatch):
    text = (families.TEMPLATES / f"{name}.jinja").read_text("utf-8")
    for record in families.make_records(name, 8):
        conversation = make_conversation(record, "a test")
        expected, _ = measure(text, conversation, monkeypatch, watched=False)
        assert measure(text, conversation, monkeypatch)[0] == expected


def test_long_conversation_takes_few_renderings(monkeypatch):
    conversation = talk(*["a"] * 2000)
    assert measure(CHATML, conversation, monkeypatch)[1] == 3
    assert learned(CHATML, conversation) == ["a<|im_end|>"] * 1000


class InProcess(TemplateProcess):
    """A template process without a process, which counts its renderings."""

    def __init__(self, text: str, **tokens: str):
        self.format, self._guard, self.renderings = template(text, **tokens), make_guard(()), 0
        self._templates = template_worker._compile(template_worker.make_environment(""), text)

    def _ask(self, request: dict):
        asked = template_worker.Conversation(*self._templates, self.format.tokens, request, NoLimits())
        with pytest.MonkeyPatch.context() as patch:
            before_call(patch, template_worker, "render", lambda *_: setattr(self, "renderings", self.renderings + 1))
            return asked.measure_prefixes() if request["measured"] else asked.render_all()


def make_long(name: str, number: int) -> dict:
    """Returns a conversation of several turns that the template of a family accepts, a third of them with thoughts."""
    first, *later = (families._make_record(name, random.Random(f"{name} {number} {n}")) for n in range(4))
    messages, think = list(first["messages"]), "<think>\nso\n</think>\n\n"
    for record in later:
        if messages[-1]["role"] == "user":
            messages.pop()
        messages += [m for m in record["messages"] if m["role"] != "system"]
    if number % 3 == 0:
        messages = [m | {"content": think + m["content"]} if m["role"] == "assistant" else m for m in messages]
    return first | {"messages": messages}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_alike_turns_have_the_spans_of_each_turns_search(name, monkeypatch):
    text = (families.TEMPLATES / f"{name}.jinja").read_text("utf-8")
    for number in range(6):
        conversation = make_conversation(make_long(name, number), "a test")
        process = InProcess(text, **dict(families.FAMILIES[name].tokens))
        expected = render_with_spans(process, conversation)
        monkeypatch.setattr(spans, "MANY", 0)
        assert render_with_spans(process, conversation) == expected
        monkeypatch.undo()


def make_steps(count: int) -> list[dict]:
    """Returns questions that are answered with one call of a tool each."""
    messages = []
    for n in range(count):
        call = {"id": f"{n:09}", "function": {"name": "weather", "arguments": {"city": f"c{n}"}}}
        result = {"role": "tool", "name": "weather", "tool_call_id": f"{n:09}", "content": f'{{"celsius": {n}}}'}
        messages += [
            {"role": "user", "content": f"q{n}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            result,
            {"role": "assistant", "content": f"a{n}"},
        ]
    return messages


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "mistral_nemo", "llama3_2", "phi3_5", "gemma2"])
def test_renderings_do_not_grow_with_the_conversation(name):
    text, family = (families.TEMPLATES / f"{name}.jinja").read_text("utf-8"), families.FAMILIES[name]
    talks = [talk(*(f"m{n}" for n in range(count))) for count in (60, 120)]
    if family.tools:
        talks += [make_conversation({"messages": make_steps(n), "tools": [families.TOOL]}, "x") for n in (30, 60)]
    counts = []
    for conversation in talks:
        process = InProcess(text, **dict(family.tokens))
        render_with_spans(process, conversation)
        counts.append(process.renderings)
    assert counts[::2] == counts[1::2]
    assert max(counts) <= 21


def test_turns_that_look_different_are_searched_one_by_one():
    process = InProcess(NUMBERED)
    shown, found = render_with_spans(process, talk(*(f"m{n}" for n in range(40))))
    assert [shown[start:end] for start, end in found][:2] == ["2m12<|im_end|>", "4m34<|im_end|>"]
    assert process.renderings > 40


def test_renderings_of_one_conversation_have_a_limit():
    with TemplateProcess(template(NUMBERED), seconds=0.02) as process:
        with pytest.raises(UsageError, match=r"0\.06 s for all prefixes of a conversation"):
            render_with_spans(process, talk(*["a"] * 400))
        assert render_with_spans(process, talk("a", "b"))[1]
