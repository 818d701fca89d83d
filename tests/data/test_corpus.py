"""Each source of text, and each cause for which it cannot be read."""

import itertools

import numpy as np
import pytest

from shardformer import Config, data
from shardformer.data import file_sources, shakespeare, text_files
from shardformer.data.prepare import prepare
from shardformer.data.recipe import split_of_text
from shardformer.data.source import OpenedSource, SourceOptions, Texts
from shardformer.data.vocabulary import Bytes
from shardformer.data.windows import Split
from shardformer.errors import UsageError
from tests.data.chat import chats
from tests.surroundings import hide_home

SPLITS = ("train", "validation", "test")
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


def load(source, vocabulary=None, **settings):
    return data.load_corpus(Config.of(**{"data": str(source), "seq": 4, "batch": 2} | settings), vocabulary)


def text_of(corpus, split: str) -> str:
    (found,) = corpus.splits(split)
    return corpus.vocabulary.decode(found.tokens.take(0, len(found.tokens)))


def test_file_is_split_in_order(text_file):
    text = "abcdefghij" * 10
    corpus = load(text_file(text))
    assert [text_of(corpus, split) for split in SPLITS] == [text[:90], text[90:95], text[95:]]
    assert corpus.held_out == ("validation", "test")


def test_split_counts_characters_not_bytes(text_file):
    assert len(text_of(load(text_file("é€" * 50)), "train")) == 90


def test_share_of_validation(text_file):
    corpus = load(text_file("ab" * 50), validation="0.2")
    assert [len(text_of(corpus, split)) for split in SPLITS] == [60, 20, 20]
    for wrong in ("0.5", "0", "-1"):
        with pytest.raises(UsageError, match=r"validation is a share in \(0, 0\.5\) or a source"):
            load(text_file("ab" * 50), validation=wrong)


def test_a_share_of_data_with_own_splits_is_rejected(tmp_path, text_file):
    for source in ("builtin", str(_prepare(tmp_path))):
        with pytest.raises(UsageError, match=r"validation=0\.2 does nothing, as data=.* has its own splits"):
            load(source, validation="0.2")
    mixture = load(f"builtin,{text_file('ab' * 50)}", validation="0.2")
    assert len(mixture.sources[1].splits["validation"].tokens) == 20


def test_no_document_in_validation_names_the_fix(tmp_path):
    with pytest.raises(UsageError, match=r"\(validation=PATH\), prepare it again with more documents"):
        load(str(_prepare(tmp_path)))
    with pytest.raises(UsageError, match=r"\(validation=PATH\), or give more documents"):
        load(str(tmp_path / "one.jsonl"))


FEW = {  # records of a word, and the text whose hash chooses their split
    "lm": lambda word: ({"text": word}, word),
    "grpo": lambda word: ({"prompt": word, "completion": "1"}, f"{word}1"),
    "dpo": lambda word: ({"prompt": word, "chosen": "a", "rejected": "b"}, word),
    "chat": lambda word: ({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "ok"}]},
                          f"{word}\nok"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FEW)
def test_few_documents_of_any_kind_have_validation(kind, tmp_path, said):
    """64 documents have none in 5% by chance in 1 of 27 files."""
    texts = map(FEW[kind], map(str, range(200)))
    records = [record for record, text in texts if split_of_text(text, 0.05) != "validation"]
    path = chats.write_lines(tmp_path / f"{kind}.jsonl", records[:64])
    settings = {"objective": "lm", "chat_template": "chatml"} if kind == "chat" else {"objective": kind}
    corpus = load(path, seq=64, batch=8, documents="padded", **settings)
    assert all(corpus.splits(split) for split in SPLITS)
    assert any("no hash of its few documents fell into validation, so it has 10% of them" in line for line in said)


def _prepare(folder):
    """One document, for training."""
    (folder / "one.jsonl").write_text('{"text": "a document for training"}\n')
    recipe = file_sources.find_recipe([str(folder / "one.jsonl")], SourceOptions())
    return prepare(recipe, Bytes(), folder / "tokens").path


def test_a_split_of_one_token_is_not_evaluated(tmp_path):
    one, two = (Split.of_ids(np.zeros(size, np.int32), "x") for size in (1, 2))
    opened = OpenedSource("x", "", {"train": two, "validation": two, "test": one})
    assert data.Corpus("x", Bytes(), (opened,)).held_out == ("validation",)


def test_validation_of_its_own(text_file, tmp_path):
    (tmp_path / "val.txt").write_text("babab\n")
    corpus = load(text_file("ab" * 50), validation=str(tmp_path / "val.txt"))
    assert text_of(corpus, "validation") == "babab\n"
    assert corpus.held_out == ("validation",)
    assert corpus.fingerprint != load(text_file("ab" * 50)).fingerprint
    assert text_of(corpus, "train") == "ab" * 50  # none of it is used for validation
    with pytest.raises(UsageError, match="has no test split; there are train, validation"):
        corpus.eval_batches("test", Config())


def test_file_is_named_by_its_absolute_path(text_file, monkeypatch, tmp_path):
    path = text_file("ab" * 50)
    monkeypatch.chdir(tmp_path)
    corpus = load("mine.txt")
    assert corpus.name == path
    assert load(corpus.name).fingerprint == corpus.fingerprint


def test_builtin():
    corpus = load("builtin")
    assert corpus.name == "builtin"
    assert len(text_of(corpus, "train")) > 900_000


def test_fingerprint_depends_on_the_data_and_not_on_its_name():
    def make(*texts: str, name: str = "a") -> str:
        return Texts(name, texts).open(Bytes(), lambda *_: None).fingerprint

    assert make("abab", "ab", "ba") == make("abab", "ab", "ba", name="moved")
    assert make("abab", "ab", "ba") != make("abab", "ab", "bb")
    assert make("abab", "ab", "ba") != make("aba", "bab", "ba")


@pytest.mark.parametrize(("tokenizer", "size"), [("auto", 2), ("chars", 2), ("bytes", 257), ("bpe:260", 260)])
def test_tokenizers(text_file, tokenizer, size):
    corpus = load(text_file("ab" * 500), tokenizer=tokenizer)
    assert len(corpus.vocabulary) <= size
    assert text_of(corpus, "train") == "ab" * 450
    (batch,) = itertools.islice(corpus.train_batches(Config.of(seq=4, batch=2, order="file")), 1)
    assert corpus.vocabulary.decode(batch["tokens"][0]) != ""
    evaluated = list(corpus.eval_batches("validation", Config.of(seq=4, batch=2)).gather())
    first = len(corpus.vocabulary.decode([corpus.splits("validation")[0].tokens.take(0, 1)[0]]))
    assert sum(b["bytes"].sum() for b in evaluated) == 50 - first


def test_bpe_needs_text_and_a_given_vocabulary_is_kept(text_file, said):
    first = load(text_file("ab" * 50), tokenizer="bpe:5000")
    assert "the text has pairs for" in said[0]
    assert load(text_file("ab" * 60), vocabulary=first.vocabulary).vocabulary is first.vocabulary
    for wrong in ("bpe:256", "bpe:", "bpe:x"):
        with pytest.raises(UsageError, match="tokenizer=bpe:N takes N from 257"):
            Config.of(tokenizer=wrong)
    with pytest.raises(UsageError, match=r"tokenizer=nowhere cannot be read: No such file.*takes chars, bytes"):
        load(text_file("ab" * 50), tokenizer="nowhere")


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ("abcabc", "too short .6 characters."), (b"abc\xffdef", "not UTF-8.*0xFF.*at byte 3")],
)
def test_useless_file(text_file, content, says):
    path = text_file(content)
    with pytest.raises(UsageError, match=says) as caught:
        load(path)
    assert path in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.txt does not exist"):
        load(tmp_path / "nowhere.txt")
    with pytest.raises(UsageError, match="is a folder without text files"):
        load(tmp_path)


@pytest.mark.parametrize("keys", [{"data": "~/a.txt"}, {"data": "builtin", "out": "~/run"}])
def test_path_in_an_unknown_home_is_rejected(monkeypatch, keys):
    hide_home(monkeypatch)
    with pytest.raises(UsageError, match="HOME is not set"):
        data.load_corpus(Config.of(**keys))


def test_characters_outside_training_are_known_and_reported(text_file, said):
    corpus = load(text_file("a" * 92 + "xyx" + "a" * 5))
    assert corpus.vocabulary.characters == "axy"
    (notice,) = said
    assert "2 of 3 characters are in validation or test only, and are not learned: 'x' 'y'" in notice


def test_unreachable_tiny_shakespeare_lists_alternatives(offline):
    with pytest.raises(UsageError, match="is not available") as caught:
        load("tiny_shakespeare")
    for words in (*ALTERNATIVES, str(offline)):
        assert words in str(caught.value)
    assert not offline.exists()


def test_unreachable_auto_takes_the_builtin_corpus(offline, said):
    corpus = load("auto")
    assert (corpus.name, corpus.fingerprint) == ("builtin", load("builtin").fingerprint)
    (notice,) = said
    for words in ("not Shakespeare's", *ALTERNATIVES):
        assert words in notice


def test_auto_takes_a_prepared_tiny_shakespeare(monkeypatch, said):
    monkeypatch.setattr(shakespeare, "is_prepared", lambda: True)
    monkeypatch.setattr(shakespeare, "_read_splits", lambda: ("abc", "ab", "bc"))
    corpus = load("auto")
    assert [corpus.name, *(text_of(corpus, split) for split in SPLITS)] == ["tiny_shakespeare", "abc", "ab", "bc"]
    assert not said


@pytest.mark.parametrize("name", ["", "*.txt"])
def test_a_folder_or_a_pattern_of_one_text(text_file, tmp_path, name):
    path = text_file("ab" * 50)
    assert load(tmp_path / name).fingerprint == load(path).fingerprint


def test_an_empty_validation_source_is_rejected(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "empty.bin").touch()
    with pytest.raises(UsageError, match=r"empty\.bin has nothing to validate on"):
        load(tmp_path / "a.bin", validation=str(tmp_path / "empty.bin"))


def test_json_lines_by_a_suffix_in_capitals(tmp_path):
    path = tmp_path / "A.JSONL"
    path.write_text('{"text": "hello"}\n')
    part = text_files.FileRange(path, 0, path.stat().st_size, True)
    assert not part.is_plain
    assert [piece.text for piece in text_files.read_pieces(part, "text")] == ["hello"]


@pytest.mark.parametrize(
    ("keys", "known"),
    [({}, True), ({"documents": "padded"}, False), ({"objective": "grpo", "batch": 8, "answer_tokens": 2}, False)],
    ids=str,
)
def test_arrays_of_plain_rows_are_known(text_file, keys, known):
    """A step is compiled for them before the first batch is read."""
    corpus = load(text_file("ab" * 50))
    config = Config.of(**{"seq": 4, "batch": 2} | keys)
    assert corpus.has_known_arrays(config) == known
    if known:
        assert next(corpus.train_batches(config)).keys() == {"tokens", "targets"}


def test_splits_are_selected_by_their_source(text_file):
    corpus = load(text_file("ab" * 50))
    split = Split.of_ids(np.arange(9))
    selected = corpus.with_splits({f"{corpus.name}/train": split, "another/validation": split})
    assert selected.named_splits() == {f"{corpus.name}/train": split}
    assert (selected.held_out, corpus.held_out) == ((), ("validation", "test"))
