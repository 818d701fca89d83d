"""Conversations as `data=`: what is rejected before a step, and mixtures with plain documents."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardformer import load_corpus
from shardformer.data.batches import TrainBatches
from shardformer.data.chat.conversations import make_conversation
from shardformer.data.corpus import choose_row_layout
from shardformer.data.recipe import Item, Recipe
from shardformer.data.text_files import FileRange, Piece
from shardformer.errors import UsageError
from tests import shared
from tests.data.chat.chats import records, write_lines


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "chat.jsonl", records(20))
    write_lines(tmp_path / "text.jsonl", [{"text": f"a text of {n} words " * 9} for n in range(20)])
    return tmp_path


def load(files, data: str, **options):
    names = ",".join(f"{files / name}=1" for name in data.split(",")) if "," in data else str(files / data)
    settings = {"data": names, "tokenizer": "bytes", "chat_template": "plain", "seq": 128, "documents": "masked"}
    config = shared.tiny(vocab=257, **settings | options)
    return load_corpus(config), config


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("text.jsonl", {}, "chat_template=plain does nothing"),
        ("chat.jsonl", {"chat_template": "no"}, "chat_template=no is not built in"),
        ("chat.jsonl", {"chat_template": "auto"}, "tokenizer=bytes has no chat template"),
        ("chat.jsonl", {"chat_template": "auto", "tokenizer": "chars"}, "has no chat template"),
        ("chat.jsonl", {"tokenizer": "ids"}, "conversations need a tokenizer"),
        ("*.jsonl", {}, "holds conversations and .* holds texts"),
    ],
)
def test_wrong_chat_data_is_rejected(files, data, options, message):
    with pytest.raises(UsageError, match=message):
        load(files, data, **options)


def test_a_record_that_is_no_conversation_is_named(files):
    with open(files / "chat.jsonl", "a") as file:
        file.write(json.dumps({"messages": [{"role": "bot", "content": "x"}]}) + "\n")
    with pytest.raises(UsageError, match=r"chat.jsonl, line 21, message 1, has the role 'bot'"):
        load(files, "chat.jsonl")


def test_chats_and_texts_mix(files):
    corpus, config = load(files, "chat.jsonl,text.jsonl")
    make = TrainBatches(corpus.splits("train"), corpus.weights, choose_row_layout(config), batch=8, seed=0)
    batch = make(0)
    texts = np.array([bytes(row.astype(np.uint8)).count(b"assistant: ") == 0 for row in batch["tokens"]])
    assert 0 < texts.sum() < 8
    assert batch["weights"][texts].mean() > 0.95
    assert 0 < batch["weights"][~texts].mean() < 0.6


def test_a_shared_system_message_does_not_choose_the_split():
    system = {"role": "system", "content": "be kind. " * 5000}
    found = [make_conversation({"messages": [system, *record["messages"]]}, "x") for record in records(60)]
    recipe, item = Recipe("TEST", (), share=0.2, chat="plain"), Item((FileRange(Path("x.jsonl"), 0, 9, True),))
    splits = {recipe.choose_split(item, Piece("the same", spans=(), key=chat.words)) for chat in found}
    assert splits == {"train", "validation", "test"}


def test_corpus_adapts_a_configuration_to_conversations(files):
    corpus, config = load(files, "chat.jsonl", documents="packed")
    with pytest.raises(UsageError, match=r"needs documents=masked or padded; Corpus\.adapt gives it"):
        next(iter(corpus.train_batches(config)))
    batches = corpus.train_batches(corpus.adapt(config))
    assert next(iter(batches))["documents"].max() > 0
    batches.close()
    assert corpus.adapt(config.replace(documents="padded")).data.documents == "padded"
