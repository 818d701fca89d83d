"""Each source of text, and each way in which it cannot be read."""

import dataclasses

import pytest

from shardformer import data
from shardformer.data import shakespeare
from shardformer.errors import UsageError

ALTERNATIVES = ("TFDS cache", "shardformer data import input.txt", "data=PATH")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shakespeare, "can_download", lambda: False)
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path):
    def write(content: str | bytes):
        path = tmp_path / "mine.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_file_is_split_in_order(text_file):
    text = "abcdefghij" * 10
    corpus = data.load_corpus(text_file(text))
    assert corpus.train + corpus.validation + corpus.test == text
    assert [len(corpus.train), len(corpus.validation), len(corpus.test)] == [90, 5, 5]


def test_split_counts_characters_not_bytes(text_file):
    assert len(data.load_corpus(text_file("é€" * 50)).train) == 90


def test_file_is_named_by_its_absolute_path(text_file, monkeypatch, tmp_path):
    path = text_file("ab" * 50)
    monkeypatch.chdir(tmp_path)
    corpus = data.load_corpus("mine.txt")
    assert corpus.name == path
    assert data.load_corpus(corpus.name) == corpus


def test_builtin():
    corpus = data.load_corpus("builtin")
    assert corpus.name == "builtin"
    assert len(corpus.train) > 900_000


def test_fingerprint_tells_the_data_and_not_its_name(text_file):
    corpus = data.load_corpus(text_file("ab" * 50))
    assert dataclasses.replace(corpus, name="moved").fingerprint == corpus.fingerprint
    assert dataclasses.replace(corpus, test="bbbbb").fingerprint != corpus.fingerprint
    moved = dataclasses.replace(corpus, train=corpus.train[:-1], validation=corpus.train[-1] + corpus.validation)
    assert moved.fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ("abcabc", "too short .6 characters."), (b"abc\xffdef", "not UTF-8.*0xFF.*at byte 3")],
)
def test_useless_file(text_file, content, says):
    path = text_file(content)
    with pytest.raises(UsageError, match=says) as caught:
        data.load_corpus(path)
    assert path in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.txt: there is no such file"):
        data.load_corpus(str(tmp_path / "nowhere.txt"))
    with pytest.raises(UsageError, match="is a folder"):
        data.load_corpus(str(tmp_path))


def test_character_that_only_validation_has(text_file):
    with pytest.raises(UsageError, match=r"validation split of .*mine\.txt: character 'x' .*index 2"):
        data.load_corpus(text_file("a" * 92 + "x" + "a" * 7))


def test_tiny_shakespeare_out_of_reach_says_what_else_to_do(offline):
    with pytest.raises(UsageError, match="is not available") as caught:
        data.load_corpus("tiny_shakespeare")
    for words in (*ALTERNATIVES, str(offline)):
        assert words in str(caught.value)
    assert not offline.exists()


def test_auto_out_of_reach_takes_the_builtin_corpus_and_says_so(offline):
    notices = []
    corpus = data.load_corpus("auto", notify=notices.append)
    assert corpus == data.load_corpus("builtin")
    (notice,) = notices
    for words in ("not Shakespeare's", *ALTERNATIVES):
        assert words in notice


def test_auto_takes_tiny_shakespeare_where_it_is(monkeypatch):
    monkeypatch.setattr(shakespeare, "is_prepared", lambda: True)
    monkeypatch.setattr(shakespeare, "_read_splits", lambda: ("abc", "ab", "bc"))
    notices = []
    assert data.load_corpus("auto", notify=notices.append) == data.Corpus("tiny_shakespeare", "abc", "ab", "bc")
    assert not notices
