"""Hugging Face's tokenizers: the same ids, every text comes back, and wrong files are named."""

import hashlib
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers

from shardformer.data import builtin, hf_tokenizer, load_vocabulary
from shardformer.data.text_cuts import cut_text
from shardformer.errors import RunError, UsageError
from tests.surroundings import change_text_limits

OF_DATA = {"source": "builtin", "fingerprint": "f" * 64}


@pytest.fixture(scope="module")
def trained():
    return hf_tokenizer.train_bpe([builtin.text()[:50_000], "naïve café “quotes” 日本語"], 400)


def random_texts(count: int) -> list[str]:
    """Returns strings from all Unicode planes, with white space and special tokens that are often misread."""
    chance = random.Random(0)
    ranges = [(32, 127), (32, 127), (0, 0x250), (0x300, 0x3000), (0x3000, 0xD800), (0xE000, 0x10FFFF)]
    special = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "'s", "'ll", "<|endoftext|>", "\u00a0", "\u200b", "é", "123"]

    def pick() -> str:
        return chance.choice(special) if chance.random() < 0.2 else chr(chance.randint(*chance.choice(ranges)))

    return ["".join(pick() for _ in range(chance.randrange(40))) for _ in range(count)]


def encode_by_hand(document: dict, text: str) -> list[int]:
    """Byte-level BPE as GPT-2 published it, for words that are already split: merges by rank only."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    ranks = {tuple(pair): rank for rank, pair in enumerate(document["model"]["merges"])}
    word = [letters[byte] for byte in text.encode()]
    while pairs := [ranks[pair] for pair in itertools.pairwise(word) if pair in ranks]:
        first, second = document["model"]["merges"][min(pairs)]
        merged, at = [], 0
        while at < len(word):
            joins = word[at : at + 2] == [first, second]
            merged.append(first + second if joins else word[at])
            at += 1 + joins
        word = merged
    return [document["model"]["vocab"][token] for token in word]


def test_ids_are_those_of_the_package_on_10000_random_texts(trained):
    theirs = tokenizers.Tokenizer.from_str(trained.text)
    theirs.encode_special_tokens = True  # special tokens in a text are letters there
    texts = random_texts(10_000)
    expected = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in trained.encode_all(texts)] == expected
    for text, ids in zip(texts[:2000], expected, strict=False):
        assert trained.decode(ids) == text


def test_words_are_merged_as_gpt2_merges_them(trained):
    document = json.loads(trained.text)
    words = {word for word in builtin.text()[:5000].split() if word.isalpha()} | {"naïve", "日本語", "zzzz"}
    for word in words:
        assert trained.encode(word).tolist() == encode_by_hand(document, word)
    shuffled = document | {"model": document["model"] | {"merges": document["model"]["merges"][::-1]}}
    assert any(trained.encode(word).tolist() != encode_by_hand(shuffled, word) for word in words)


def test_special_tokens_are_letters_unless_asked_otherwise(trained):
    text = "a<|endoftext|>b"
    assert trained.end_of_text not in trained.encode(text)
    assert trained.decode(trained.encode(text)) == text
    asked = hf_tokenizer.HfTokenizer(trained.name, trained.text, special_tokens=True)
    assert asked.encode(text).tolist() == [*asked.encode("a"), asked.end_of_text, *asked.encode("b")]
    assert asked.decode([asked.end_of_text]) == "<|endoftext|>"
    assert asked != trained


def test_a_long_text_is_cut_without_changing_a_token(trained, monkeypatch):
    change_text_limits(monkeypatch, piece=300)
    text = builtin.text()[:20_000].replace("ACT", "\n \n\tACT  ")
    assert len(cut_text(text)) > 20
    assert np.array_equal(trained.encode(text), trained.encode_all([text])[0])


def test_characters_come_whole_and_bytes_are_counted(trained):
    text = "naïve “日本” 😀!"
    ids = trained.encode(text)
    pieces = list(trained.decode_stream(ids.tolist()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "\ufffd" in "".join(trained.decode([token]) for token in ids)  # which is what a stream is for
    assert list(trained.decode_stream(trained.encode("😀")[:2].tolist()))[-1] == "\ufffd"
    assert trained.byte_lengths()[ids].sum() == len(text.encode())
    assert trained.byte_lengths()[trained.end_of_text] == 0


def test_training_is_deterministic_and_says_how_far_it_got(trained):
    texts = [builtin.text()[:50_000], "naïve café “quotes” 日本語"]
    assert hf_tokenizer.train_bpe(texts, 400).sha256 == trained.sha256
    assert len(trained) == 400
    assert len(hf_tokenizer.train_bpe(["ab ab"], 5000)) < 300


def test_kept_with_a_run_by_its_hash(trained, tmp_path):
    for name, text in trained.documents(**OF_DATA).items():
        (tmp_path / name).write_text(text, "utf-8")
    assert load_vocabulary(tmp_path) == (trained, OF_DATA["fingerprint"])
    other = hf_tokenizer.train_bpe(["another text"], 300)
    (tmp_path / "tokenizer.json").write_text(other.text, "utf-8")
    with pytest.raises(RunError, match=r"tokenizer\.json is not the tokenizer that .* was made with"):
        load_vocabulary(tmp_path)
    for text in ("{}", '{"model": 5}'):  # whoever damages one can write its hash, too
        (tmp_path / "tokenizer.json").write_text(text)
        record = trained.record | OF_DATA | {"name": "x", "sha256": hashlib.sha256(text.encode()).hexdigest()}
        (tmp_path / "vocabulary.json").write_text(json.dumps(record))
        with pytest.raises(RunError, match=r"vocabulary\.json is damaged"):
            load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"cannot read .*tokenizer\.json"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b'{"model": {"type": "Other"}}', b"\xff\xfe", b"\x00" * 100])
def test_wrong_files_are_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizer\.json of Hugging Face's") as caught:
        hf_tokenizer.open_file(path)
    assert "\n" not in str(caught.value)


def test_missing_and_oversized_files(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read.*takes chars, bytes, bpe:N"):
        hf_tokenizer.open_file(tmp_path / "nowhere.json")
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(hf_tokenizer.MAX_FILE + 1)  # it takes no room on the disk
    with pytest.raises(UsageError, match=r"large\.json has 268,435,457 bytes, which no tokenizer\.json has"):
        hf_tokenizer.open_file(tmp_path / "large.json")


def test_half_a_character_is_named(trained):
    with pytest.raises(UsageError, match=r"the text: '\\ud800' is half of a character"):
        hf_tokenizer.train_bpe(["ab", "a\ud800b"], 300)
    with pytest.raises(UsageError, match=r"prompt: '\\udcff' is half of a character"):
        trained.encode("a\udcff", source="prompt")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"tokenizer=bpe:300 needs the package tokenizers; .*tokenizer=bytes"):
        hf_tokenizer.train_bpe(["text"], 300)
