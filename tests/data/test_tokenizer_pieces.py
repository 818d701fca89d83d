"""Long documents are encoded in pieces, with the ids that the tokenizer gives to the full text."""

import gzip
import json
import os

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardformer import Config
from shardformer.convert import hf
from shardformer.convert.runs import open_vocabulary
from shardformer.data import builtin, file_sources, hf_tokenizer, prepare, text_cuts, text_files
from shardformer.data.source import SourceOptions
from shardformer.data.text_cuts import LINE, LINE_BEFORE_WORD, SPACE_BEFORE_WORD
from shardformer.errors import UsageError
from tests.surroundings import change_text_limits

CODE = "".join(f"def f{n}():\n    return {n}  # note\n\n\nx = f{n}()\n//\nend.\n/usr/{n}\n" for n in range(40))
PARAGRAPHS = "\n\n".join(builtin.text()[n * 300 : n * 300 + 250].replace("\n", " ") for n in range(40))
TEXT = builtin.text()[:12_000] + CODE + "  naïve “日本語” 😀\n \n" + PARAGRAPHS
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(tokenizer: Tokenizer, kind: str = "bpe", **options) -> Tokenizer:
    if kind == "bpe":
        trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, **options)
    else:
        trainer = trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        )
    tokenizer.train_from_iterator([TEXT, TEXT.upper()], trainer)
    return tokenizer


def make_byte_level(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def make_split_by(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def make_without_words() -> Tokenizer:
    """Byte-level BPE over the full text: entries such as 'the end.\\n/' cross every type of boundary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("ACT"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def make_metaspace(scheme: str, split: bool = True, kind: str = "bpe") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>") if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return train(tokenizer, kind, **({"special_tokens": ["<unk>"]} if kind == "bpe" else {}))


def make_llama() -> Tokenizer:
    """Llama 2's pipeline: a normalizer puts '▁' in front and for spaces, no pre-tokenizer, other bytes are <0xNN>."""
    learned = json.loads(make_metaspace("first").to_str())["model"]
    entries = [entry for entry in learned["vocab"] if "\n" not in entry and entry != "<unk>"]
    ids = {entry: n for n, entry in enumerate(["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *entries])}
    merges = [tuple(pair) for pair in learned["merges"] if "\n" not in "".join(pair)]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def make_t5() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return train(tokenizer, "unigram")


def make_bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, show_progress=False, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


KINDS = {
    "gpt2": lambda: make_byte_level(False),
    "add_prefix_space": lambda: make_byte_level(True),
    "cl100k": lambda: make_split_by(CL100K),
    "o200k": lambda: make_split_by(CL100K.replace(r"[\r\n]*", r"[\r\n/]*")),
    "no_words": make_without_words,
    "metaspace_first": lambda: make_metaspace("first"),
    "metaspace_always": lambda: make_metaspace("always", split=False),
    "metaspace_never": lambda: make_metaspace("never"),
    "unigram": lambda: make_metaspace("first", kind="unigram"),
    "llama": make_llama,
    "t5": make_t5,
    "bert": make_bert,
}
CAN_BE_CUT = ("gpt2", "add_prefix_space", "cl100k", "o200k", "llama", "bert", "metaspace_first")


@pytest.fixture(scope="module")
def documents():
    return {name: make().to_str() for name, make in KINDS.items()}


@pytest.fixture
def small_pieces(monkeypatch):
    change_text_limits(monkeypatch, piece=200, look_ahead=700, range=4000)


def encode_by_package(document: str, text: str) -> list[int]:
    return Tokenizer.from_str(document).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_full_text(documents, small_pieces, kind):
    expected = encode_by_package(documents[kind], TEXT)
    found = hf_tokenizer.HfTokenizer(kind, documents[kind])
    assert found.encode(TEXT).tolist() == expected
    assert bool(found.breaks) or kind not in CAN_BE_CUT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_files_have_the_ids_of_the_full_text(documents, small_pieces, tmp_path, kind, name):
    content = json.dumps({"text": TEXT}) + "\n" if name.endswith(".jsonl") else TEXT
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    recipe = file_sources.find_recipe([str(path)], SourceOptions(named_validation=True))
    vocabulary = hf_tokenizer.HfTokenizer(kind, documents[kind])
    tokens = prepare.prepare(recipe, vocabulary, tmp_path / "out").split("train").tokens
    assert tokens.take(0, len(tokens)).tolist() == encode_by_package(documents[kind], TEXT)


@pytest.mark.parametrize("kind", CAN_BE_CUT)
def test_long_texts_of_common_tokenizers_are_cut(documents, small_pieces, kind):
    breaks = hf_tokenizer.HfTokenizer(kind, documents[kind]).breaks
    assert len(text_cuts.cut_text(TEXT, breaks)) > 20


def test_breaks_of_known_tokenizers(documents):
    found = {kind: hf_tokenizer.HfTokenizer(kind, documents[kind]).breaks for kind in KINDS}
    assert found["gpt2"] == found["cl100k"] == found["llama"] == (LINE, SPACE_BEFORE_WORD)
    assert found["o200k"] == (LINE_BEFORE_WORD, SPACE_BEFORE_WORD)
    assert found["no_words"] == ()


def test_a_cut_at_any_line_changes_ids(documents):
    """The negative twin: these tokenizers need other split points than most."""
    for kind in ("no_words", "o200k", "add_prefix_space"):
        pieces = text_cuts.cut_text(TEXT, (LINE,), 200)
        ids = [n for piece in pieces for n in encode_by_package(documents[kind], piece)]
        assert ids != encode_by_package(documents[kind], TEXT)


def test_a_completion_continues_its_prompt(documents):
    tokenizer = hf_tokenizer.HfTokenizer("x", documents["add_prefix_space"])
    prompt, completion = tokenizer.encode_pieces(["Where is it?", " Here."], [True, False])
    assert [*prompt, *completion] == encode_by_package(documents["add_prefix_space"], "Where is it? Here.")


def test_a_document_that_cannot_be_cut_is_bounded(documents, monkeypatch, tmp_path):
    change_text_limits(monkeypatch, uncut=10_000)
    tokenizer = hf_tokenizer.HfTokenizer("x", documents["no_words"])
    for name in ("a.txt", "a.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(TEXT.encode()) if name.endswith(".gz") else TEXT.encode())
        recipe = file_sources.find_recipe([str(tmp_path / name)], SourceOptions(named_validation=True))
        with pytest.raises(UsageError, match=r"holds a document of more than 10,000 characters"):
            prepare.prepare(recipe, tokenizer, tmp_path / "out")


@pytest.mark.parametrize("text", ["ab" * 9_000, "é\n\n" * 9_000, "日本" * 9_000])
def test_packed_texts_without_breaks_are_complete(small_pieces, monkeypatch, tmp_path, text):
    change_text_limits(monkeypatch, waiting=2000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    part = text_files.FileRange(tmp_path / "a.txt.gz", 0, 0, True)
    pieces = list(text_files.read_pieces(part, "text"))
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= 3000


@pytest.mark.parametrize("character", ["\n", " ", "\x00", "é"])
def test_a_packed_file_of_one_character_is_rejected_early(tmp_path, character):
    """Rejects the file before tokenising: BPE spent 66 s on 64 MB of line feeds, whose tokens have 65 kB."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(character.encode() * (8 << 20)))
    pieces = text_files.read_pieces(text_files.FileRange(tmp_path / "a.txt.gz", 0, 0, True), "text")
    with pytest.raises(UsageError, match=r"a\.txt\.gz repeats .* more than 1,048,576 times: this is not text"):
        next(pieces)


def test_dropout_is_off_and_said(documents, tmp_path):
    document = json.loads(documents["gpt2"])
    document["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    theirs = {tuple(encode_by_package(json.dumps(document), TEXT)) for _ in range(3)}
    assert len(theirs) == 3  # as the file says
    found = hf_tokenizer.open_file(tmp_path)
    assert found.encode(TEXT).tolist() == encode_by_package(documents["gpt2"], TEXT)
    assert "dropout=0.5, which would give other ids at every start: it is off here" in found.notice
    assert not hf_tokenizer.HfTokenizer("x", documents["gpt2"]).notice


def make_gpt2_folder(folder, document: str):
    model = json.loads(document)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    merges = "".join(f"{first} {second}\n" for first, second in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")


def test_vocab_and_merges_are_gpt2s_tokenizer(documents, tmp_path):
    make_gpt2_folder(tmp_path, documents["gpt2"])
    theirs = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert hf_tokenizer.open_file(tmp_path).encode(TEXT).tolist() == theirs.encode(TEXT).ids
    assert hf_tokenizer.has_tokenizer(tmp_path)


def test_settings_beside_vocab_and_merges_are_read(documents, tmp_path):
    make_gpt2_folder(tmp_path, documents["add_prefix_space"])
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    expected = encode_by_package(documents["add_prefix_space"], "Where is it?")
    assert hf_tokenizer.open_file(tmp_path).encode("Where is it?").tolist() == expected
    (tmp_path / "added_tokens.json").write_text('{"<turn>": 500}')
    with pytest.raises(UsageError, match=r"has the token '<turn>' beside vocab\.json; make a tokenizer\.json"):
        hf_tokenizer.open_file(tmp_path)


def test_a_converted_model_takes_vocab_and_merges(documents, tmp_path):
    make_gpt2_folder(tmp_path, documents["gpt2"])
    config, vocabulary, _ = open_vocabulary(hf.choose_tokenizer(tmp_path, Config.of(vocab=600)))
    assert config.data.tokenizer == str(tmp_path)
    assert vocabulary.encode(TEXT).tolist() == encode_by_package(documents["gpt2"], TEXT)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UsageError, match=r"has vocab\.json and no tokenizer\.json; .* or give tokenizer=ids"):
        open_vocabulary(hf.choose_tokenizer(tmp_path, Config.of(vocab=600)))


def test_a_damaged_vocab_is_rejected(documents, tmp_path):
    make_gpt2_folder(tmp_path, documents["gpt2"])
    for file, content in (
        ("vocab.json", "{}"),
        ("vocab.json", "["),
        ("merges.txt", "a b c\n"),
        ("vocab.json", '{"a": 0}'),
    ):
        make_gpt2_folder(tmp_path, documents["gpt2"])
        (tmp_path / file).write_text(content)
        with pytest.raises(UsageError, match=r"vocab\.json"):
            hf_tokenizer.open_file(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt"])
def test_a_folder_with_half_a_tokenizer_is_rejected(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(UsageError, match=rf"has {name} and no tokenizer\.json; make one there"):
        hf_tokenizer.open_file(tmp_path)


def test_a_tokenizer_json_that_is_no_file_is_rejected(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read: No such file"):
        hf_tokenizer.open_file(tmp_path)
    assert hf_tokenizer.has_tokenizer(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match=r"tokenizer\.json is a folder"):
        hf_tokenizer.open_file(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read: It is a pipe"):
        hf_tokenizer.open_file(tmp_path)


def make_word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_backtracking() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    return tokenizer


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (make_word_level, "a b", "WordLevel error"),
        (lambda: Tokenizer(models.Unigram([("a", 0.0)], None, False)), "xyz", "unk_id"),
        (make_backtracking, "x" * 40, "retry-limit-in-match"),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_named(make, text, message):
    tokenizer = hf_tokenizer.HfTokenizer("mine.json", make().to_str())
    with pytest.raises(UsageError, match=rf"notes: tokenizer=mine\.json fails to encode it \(.*{message}"):
        tokenizer.encode(text, "notes")


def test_decoding_returns_the_text_of_byte_level_pieces(documents, small_pieces):
    tokenizer = Tokenizer.from_str(documents["gpt2"])
    tokenizer.decoder = decoders.ByteLevel()
    ids = hf_tokenizer.HfTokenizer("x", tokenizer.to_str()).encode(TEXT)
    assert tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False) == TEXT
