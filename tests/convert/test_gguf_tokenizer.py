"""A run's tokenizer in a GGUF file: the kinds of llama.cpp, their special tokens, and those that are rejected.

With these keys llama.cpp gave the ids of our tokenizers for texts with digits, white space and letters of no word.
"""

import dataclasses
import json

import pytest

from shardformer.config import Config
from shardformer.convert.gguf_tokenizer import PRE_TOKENIZERS, list_keys
from shardformer.data import SpecialTokens
from shardformer.data.hf_tokenizer import HfTokenizer, train_bpe
from shardformer.data.vocabulary import Bytes, Characters, TokenIds
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run

pytest.importorskip("tokenizers")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def keys_of(vocabulary, vocab=None, **special) -> dict:
    config = Config.of(vocab=vocab or len(vocabulary))
    keys = list_keys(Run(config, vocabulary, "", SpecialTokens(**special)))
    return {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}


def byte_level(**changes) -> HfTokenizer:
    document = json.loads(train_bpe(["the cat and the hat"] * 3, 262).text)
    return HfTokenizer("own", json.dumps(document | changes))


def pieces(**changes) -> HfTokenizer:
    """Llama 2's form: SentencePiece's pieces, and bytes for letters that are none of them."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "\u2581", "ab", "\u2581ab"]
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "unk_token": "<unk>"}
    model |= {"merges": ["a b", "\u2581 ab"], "byte_fallback": True, "fuse_unk": True}
    normalizer = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]}  # fmt: skip
    template = {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
    ], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": tokens[number], "special": number != 2} | flags for number in (1, 2)]
    document = {"model": model, "normalizer": normalizer, "post_processor": template, "added_tokens": added}
    document |= {"version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None, "decoder": None}
    return HfTokenizer("pieces", json.dumps(document | changes))


def test_a_trained_bpe_is_gpt2s():
    vocabulary = byte_level()
    keys = keys_of(vocabulary, vocab=264)
    ids = json.loads(vocabulary.text)["model"]["vocab"]
    assert (keys["model"], keys["pre"], keys["add_bos_token"]) == ("gpt2", "gpt-2", False)
    assert [keys["tokens"].index(token) for token in ids] == list(ids.values())
    assert len(keys["tokens"]) == len(keys["token_type"]) == 264
    assert keys["tokens"][len(vocabulary) :] == [f"[PAD{number}]" for number in range(len(vocabulary), 264)]
    assert set(keys["token_type"][len(vocabulary) :]) == {UNUSED}
    assert keys["merges"][0] in ("t h", "h e", "a t")
    assert keys["token_type"][vocabulary.end_of_text] == CONTROL
    assert keys["eos_token_id"] == vocabulary.end_of_text


@pytest.mark.parametrize("pattern", PRE_TOKENIZERS)
def test_words_of_a_regular_expression_are_named(pattern):
    assert keys_of(byte_level(**words(pattern)))["pre"] == PRE_TOKENIZERS[pattern]
    with pytest.raises(UsageError, match=r"tokenizer=own splits a text by .*'vee.*; give tokenizer=false"):
        keys_of(byte_level(**words(pattern.replace("'ve", "'vee"))))


def test_single_digits_are_starcoders():
    steps = [{"type": "Digits", "individual_digits": True}]
    steps += [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
    assert keys_of(byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}))["pre"] == "starcoder"


def test_a_prefix_that_llama_cpp_lacks_is_rejected():
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    with pytest.raises(UsageError, match="for which no name of llama"):
        keys_of(byte_level(pre_tokenizer=prefix))


def test_pieces_have_scores_in_the_order_of_their_merges():
    keys = keys_of(pieces(), vocab=16)
    assert (keys["model"], keys["add_space_prefix"], keys["add_bos_token"]) == ("llama", True, True)
    assert keys["scores"] == [*[-3.0] * 7, -1.0, -2.0, *[-3.0] * 7]
    assert keys["token_type"][:9] == [UNKNOWN, CONTROL, USER_DEFINED, BYTE, *[NORMAL] * 5]
    assert (keys["bos_token_id"], keys["unknown_token_id"], keys["eos_token_id"]) == (1, 0, 2)
    assert len(keys["scores"]) == len(keys["tokens"]) == 16
    without = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}  # Gemma's
    assert keys_of(pieces(normalizer=without))["add_space_prefix"] is False


def test_pieces_that_no_merge_makes_are_formed_last():
    """llama.cpp would form them first with a score of 0; Hugging Face never forms them."""
    document = json.loads(pieces().text)
    document["model"]["vocab"]["ba"] = 9
    keys = keys_of(HfTokenizer("pieces", json.dumps(document)))
    assert keys["tokens"][9] == "ba"
    assert keys["scores"][9] < min(keys["scores"][7:9]) == -2


LLAMA3, QWEN2 = PRE_TOKENIZERS
MARK = "\u2581"
MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}


def chain(*steps) -> dict:
    return {"type": "Sequence", "normalizers": list(steps)}


def words(pattern, **model) -> dict:
    """The parts of a byte-level BPE with the words of a regular expression."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    changed = json.loads(byte_level().text)["model"] | model
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": changed}


PUBLISHED = {  # forms of published tokenizers
    "GPT-2": lambda: byte_level(**words(QWEN2, continuing_subword_prefix="", end_of_word_suffix="")),
    "Pythia": lambda: byte_level(normalizer={"type": "NFC"}),
    "DeepSeek": lambda: byte_level(normalizer=chain()),
    "Qwen2": lambda: byte_level(normalizer={"type": "NFC"}, **words(QWEN2, ignore_merges=False)),
    "Llama 3": lambda: byte_level(**words(LLAMA3, ignore_merges=True)),
    "Gemma": lambda: pieces(normalizer=MARK_SPACES),
    "Mistral 3": lambda: pieces(normalizer=None, pre_tokenizer={
        "type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_normalizers_of_published_tokenizers_are_accepted(name):
    keys = keys_of(PUBLISHED[name]())
    assert keys.get("add_space_prefix") == {"Gemma": False, "Mistral 3": True}.get(name)


LOWERCASE = {"type": "Lowercase"}
REJECTED = {
    "lowercase": (lambda: byte_level(normalizer=LOWERCASE), r'normalises a text by \{"type": "Lowercase"\}, which'),
    "in_a_chain": (lambda: byte_level(normalizer=chain(chain({"type": "NFC"}, LOWERCASE))), "Lowercase"),
    "of_pieces": (lambda: pieces(normalizer=chain(MARK_SPACES, LOWERCASE)), "Lowercase"),
    "composed_pieces": (lambda: pieces(normalizer={"type": "NFC"}), "NFC"),
    "marks_of_bytes": (lambda: byte_level(normalizer=MARK_SPACES), "Replace"),
    "other_mark": (lambda: pieces(normalizer=MARK_SPACES | {"content": "_"}), '"content": "_"'),
    "other_prefix": (lambda: pieces(normalizer={"type": "Prepend", "prepend": "a"}), '"prepend": "a"'),
    "whole_words": (lambda: byte_level(**words(QWEN2, ignore_merges=True)), "ignore_merges=True, .* for pre=qwen2"),
    "ends": (lambda: byte_level(**words(LLAMA3, end_of_word_suffix="</w>")), "has end_of_word_suffix='</w>'"),
    "prefixes": (
        lambda: byte_level(**words(LLAMA3, continuing_subword_prefix="#", merges=[])), "continuing_subword_prefix='#'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_settings_that_llama_cpp_lacks_are_rejected(name):
    make, message = REJECTED[name]
    with pytest.raises(UsageError, match=rf"{message}.*; give tokenizer=false"):
        keys_of(make())


def test_other_models_are_rejected():
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    with pytest.raises(UsageError, match=r"'WordLevel' model, and only BPE is written; give tokenizer=false"):
        keys_of(pieces(model=model, added_tokens=[], post_processor=None))


def test_bytes_are_a_bpe_without_merges():
    keys = keys_of(Bytes(), vocab=264)
    assert (keys["model"], keys["merges"], keys["eos_token_id"]) == ("gpt2", [], 256)
    assert keys["tokens"][:2] + [keys["tokens"][byte] for byte in b" \na\xff"] == [*"\u0100\u0101\u0120\u010aa\u00ff"]
    trained = json.loads(byte_level().text)["model"]["vocab"]
    assert set(keys["tokens"][:256]) <= trained.keys()


@pytest.mark.parametrize("vocabulary", [Characters("abc"), TokenIds(7)])
def test_a_run_without_subwords_has_no_vocabulary(vocabulary):
    assert keys_of(vocabulary) == {"model": "no_vocab"}


def test_special_tokens_are_those_of_the_published_model():
    keys = keys_of(byte_level(), beginning=3, ends=(5, 6), padding=4)
    assert [keys[f"{name}_token_id"] for name in ("bos", "eos", "eot", "padding")] == [3, 5, 6, 4]


def test_the_chat_template_is_written():
    @dataclasses.dataclass(frozen=True)
    class Format:
        template: str

    vocabulary = byte_level().with_chat(Format("{{ messages }}"))
    keys = list_keys(Run(Config.of(vocab=len(vocabulary)), vocabulary, ""))
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert "tokenizer.chat_template" not in list_keys(Run(Config.of(vocab=264), byte_level(), ""))
