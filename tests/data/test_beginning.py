"""Every document of the training data starts with the tokens that its tokenizer puts first."""

import json

import numpy as np
import pytest

from shardformer import preset
from shardformer.__main__ import main
from shardformer.data import load_corpus, open_vocabulary
from shardformer.errors import UsageError

tokenizers = pytest.importorskip("tokenizers")
BEGIN, END = 0, 1


@pytest.fixture
def tokenizer(tmp_path):
    """The path of a tokenizer of letters that puts <s> before a text."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz \n.", start=2)}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": BEGIN, "</s>": END} | letters, unk_token="."))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    found.add_special_tokens(["<s>", "</s>"])
    found.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    found.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def load(data, tokenizer, **options):
    settings = preset("tiny").replace(data=str(data), tokenizer=str(tokenizer), **{"validation": "0.2"} | options)
    return load_corpus(settings)


@pytest.mark.parametrize("known", [{}, {"<ghost>": {"id": "<ghost>", "ids": [77], "tokens": ["<ghost>"]}}])
def test_post_processor_with_an_unknown_token_is_named(tmp_path, tokenizer, known, capfd):
    document = json.loads(tokenizer.read_text())
    document["post_processor"]["single"][0]["SpecialToken"]["id"] = "<ghost>"
    document["post_processor"]["special_tokens"] = known
    tokenizer.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="its post_processor puts '<ghost>' around a text, a token that its"):
        load(write_documents(tmp_path / "d.jsonl"), tokenizer)
    assert "panic" not in capfd.readouterr().err


def write_documents(path, count=60, **fields):
    rows = [{"text": f"document {chr(97 + i % 26)}{chr(97 + i // 26)}"} | fields for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("bos", "first"), [("auto", BEGIN), ("true", BEGIN), ("false", None)])
def test_every_document_begins_with_bos(tmp_path, tokenizer, bos, first):
    corpus = load(write_documents(tmp_path / "d.jsonl"), tokenizer, bos=bos)
    for name in ("train", "validation", "test"):
        (split,) = corpus.splits(name)
        ids = split.tokens.take(0, len(split.tokens))
        starts = np.concatenate([[0], split.ends[:-1]])
        assert (ids[split.ends - 1] == END).all()
        assert ((ids[starts] == BEGIN) == (first is not None)).all()
        assert (ids == BEGIN).sum() == (0 if first is None else len(starts))


def test_bos_counts_as_part_of_a_prompt(tmp_path, tokenizer):
    rows = [{"prompt": "ask ", "completion": f"say {chr(97 + i)}"} for i in range(20)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (split,) = load(tmp_path / "d.jsonl", tokenizer).splits("train")
    assert set(split.prompts.tolist()) == {1 + len("ask ")}


def test_one_long_text_begins_once(tmp_path, tokenizer):
    (tmp_path / "d.txt").write_text("a long text.\n" * 500)
    corpus = load(tmp_path / "d.txt", tokenizer)
    (train,), (validation,) = corpus.splits("train"), corpus.splits("validation")
    assert train.tokens.take(0, 1)[0] == BEGIN
    assert (train.tokens.take(0, len(train.tokens)) == BEGIN).sum() == 1
    assert not (validation.tokens.take(0, len(validation.tokens)) == BEGIN).any()


def test_bos_changes_the_fingerprint(tmp_path, tokenizer):
    data = write_documents(tmp_path / "d.jsonl")
    with_bos, without = (load(data, tokenizer, bos=bos) for bos in ("auto", "false"))
    assert with_bos.fingerprint != without.fingerprint


def test_a_tokenizer_without_beginning_rejects_bos_true():
    with pytest.raises(UsageError, match="bos=true: tokenizer=ids puts no token before a text"):
        open_vocabulary("ids", 10).with_beginning("true")


def test_bos_true_takes_the_beginning_of_a_published_model(tokenizer):
    document = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(document | {"post_processor": None}))
    with pytest.raises(UsageError, match="puts no token before a text"):
        open_vocabulary(str(tokenizer), 40, bos="true")
    assert open_vocabulary(str(tokenizer), 40, bos="true", first=BEGIN).beginning == (BEGIN,)
    for bos in ("auto", "false"):
        assert open_vocabulary(str(tokenizer), 40, bos=bos, first=BEGIN).beginning == ()


def test_prepared_data_keeps_its_beginning(tmp_path, tokenizer):
    data = write_documents(tmp_path / "d.jsonl")
    words = ["data", "prepare", data, f"out={tmp_path / 'p'}", f"tokenizer={tokenizer}"]
    assert main([str(word) for word in words]) == 0
    assert load(tmp_path / "p", "auto", validation="").vocabulary.beginning == (BEGIN,)
    with pytest.raises(UsageError, match="was prepared with"):
        load(tmp_path / "p", "auto", validation="", bos="false")
