"""Four commands from chats and a Hugging Face folder to a tuned model, as the README has them."""

import json
from pathlib import Path

import pytest

from shardformer.data.chat.chat_format import read_format
from tests import runs
from tests.data.chat.walk import commands, walk


def test_the_walk_has_four_commands():
    assert [words[0] for words in commands()] == ["data", "data", "train", "convert", "sample"]


@pytest.mark.slow
def test_the_walk_of_the_readme(tmp_path, monkeypatch, capsys):
    assert walk(monkeypatch, tmp_path) == [0] * 5
    out = capsys.readouterr().out
    assert "assistant\n>>><think>\n\n</think>\n\nit is 7.<|im_end|><<<" in out
    assert "rows;" in out
    losses = [float(row["loss"]) for row in runs.rows(tmp_path / "checkpoints" / "chat") if row["loss"]]
    assert losses[-1] < losses[0] - 1
    tuned = Path("tuned")
    assert json.loads((tuned / "config.json").read_text())["model_type"] == "llama"
    assert (tuned / "tokenizer.json").read_bytes() == Path("HF_FOLDER", "tokenizer.json").read_bytes()
    assert read_format(tuned).template == read_format(Path("HF_FOLDER")).template
