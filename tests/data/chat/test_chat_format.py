"""Chat templates of a tokenizer's folder, as transformers finds them, and the built-in ones."""

import json

import pytest

from shardformer.data.chat.chat_format import ChatFormat, load_format, make_builtin, read_format, resolve_format
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.errors import RunError, UsageError
from tests.data.chat.chats import talk

TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}


def write(folder, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS | settings))
    return folder


def test_the_template_of_a_tokenizer(tmp_path):
    found = read_format(write(tmp_path, chat_template="{{ bos_token }}"))
    assert (found.template, found.tokens) == ("{{ bos_token }}", {"bos_token": "<s>", "eos_token": "</s>"})


def test_a_template_file_rules_over_the_settings(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert read_format(write(tmp_path, chat_template="of the settings")).template == "of the file"


def test_a_list_has_a_template_for_tools(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    with TemplateProcess(read_format(write(tmp_path, chat_template=templates))) as process:
        assert process.render(talk("a")).text == "plain"
        assert process.render(talk("a", tools=[{"name": "f"}])).text == "with tools"


@pytest.mark.parametrize(
    "settings", [{}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}]
)
def test_a_tokenizer_without_a_template_needs_a_name(settings, tmp_path):
    assert read_format(write(tmp_path, **settings)) is None
    with pytest.raises(UsageError, match=r"no chat template.*chatml"):
        resolve_format("auto", None, "TOKENIZER")


def test_a_name_rules_over_the_own_template():
    own = ChatFormat("own", "x", {"bos_token": "<s>"})
    assert resolve_format("auto", own, "t") is own
    assert resolve_format("llama3", own, "t").tokens == own.tokens
    with pytest.raises(UsageError, match=r"chat_template=no is not built in; it takes auto, chatml"):
        resolve_format("no", own, "t")


def test_a_run_keeps_its_date():
    own = ChatFormat("chatml", make_builtin("chatml").template, {}, "2020-01-01")
    assert resolve_format("chatml", own, "t").date == "2020-01-01"


def test_the_date_counts_if_the_template_reads_it():
    dated, plain = "{{ strftime_now('%d') }}", "x"
    for text, same in ((dated, False), (plain, True)):
        pair = [ChatFormat("t", text, {}, date).identity for date in ("2020-01-01", "2020-01-02")]
        assert (pair[0] == pair[1]) is same


def test_a_stored_format_comes_back(tmp_path):
    own = ChatFormat("own", "x", {"bos_token": "<s>"}, "2020-01-01", "y")
    for name, text in own.documents().items():
        (tmp_path / name).write_text(text)
    assert load_format(tmp_path) == own
    assert load_format(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"name": 3}'])
def test_a_damaged_format_is_named(text, tmp_path):
    (tmp_path / "chat_template.json").write_text(text)
    with pytest.raises(RunError, match=r"chat_template.json is damaged"):
        load_format(tmp_path)
