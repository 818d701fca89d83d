"""`data show` of a file of conversations that is not prepared."""

import pytest

from shardformer.__main__ import main
from tests.data.chat.chats import records, write_lines
from tests.runs import USAGE


@pytest.fixture
def chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chat.jsonl", records(20))


def show(capsys, *words) -> str:
    assert main(["data", "show", "chat.jsonl", *words]) == 0
    return capsys.readouterr().out


def test_raw_file_is_shown_as_the_prepared_one(chat, capsys):
    raw = show(capsys, "chat_template=plain", "tokenizer=bytes")
    assert ">>>it is 0 😀\n\n<<<" in raw
    words = ["chat.jsonl", "out=tokens", "chat_template=plain", "tokenizer=bytes", "validation=none"]
    assert main(["data", "prepare", *words]) == 0
    capsys.readouterr()
    assert main(["data", "show", "tokens"]) == 0
    assert raw.strip() in capsys.readouterr().out
    assert main(["data", "show", "tokens", "tokenizer=bytes"]) == USAGE
    assert "tokens is prepared and has its tokenizer" in capsys.readouterr().err


def test_template_alone_is_enough(chat, capsys):
    assert "<|im_start|>assistant\n>>>it is 0" in show(capsys, "chat_template=chatml")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("data show chat.jsonl tokenizer=HF_FOLDER, or a built-in template: chat_template=chatml|", ["chat.jsonl"]),
        ("has no chat template, neither in chat_template.jinja", ["chat.jsonl", "tokenizer=bytes"]),
        ("text.txt is not a prepared folder, and holds no conversations", ["text.txt"]),
    ],
)
def test_other_files_are_rejected(chat, tmp_path, capsys, message, words):
    (tmp_path / "text.txt").write_text("a text")
    assert main(["data", "show", *words]) == USAGE
    assert message in capsys.readouterr().err
