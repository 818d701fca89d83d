"""The bound of the text that a tokenizer.json makes of a text, compared with what the package makes of it."""

import base64
import json
import random

import pytest
import tokenizers

from shardformer.data import hf_tokenizer
from shardformer.data.tokenizer_growth import MAX_GROWTH, bound_growth
from shardformer.errors import UsageError

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
INSERT = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACED = BYTES | {"add_prefix_space": True}
LETTERS = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [],
         "special_tokens": {}}  # fmt: skip
LONGEST = "صلى الله عليه وسلم"  # of Unicode's tables: ﷺ


def make_table(*texts: str) -> dict:
    """Returns the step with SentencePiece's table; its trie is empty."""
    table = (0).to_bytes(4, "little") + b"\0".join(text.encode() for text in (*texts, ""))
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def chain(part: str, *steps: dict) -> dict:
    """Returns a part of a tokenizer.json with these steps."""
    name = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    return {part: {"type": "Sequence", name.get(part, "decoders"): list(steps)}}


def write(folder, parts: dict):
    document = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).to_str()) | parts
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


GROWING = {
    "replacements": chain("normalizer", *[REPLACE] * 8),
    "nested replacements": chain("normalizer", *[chain("normalizer", *[REPLACE] * 4)["normalizer"]] * 2),
    "insertions": chain("normalizer", *[INSERT] * 30),
    "prefixes": chain("pre_tokenizer", *[LETTERS, METASPACE] * 12),
    "bytes of bytes": chain("pre_tokenizer", *[BYTES] * 30),
    "copies": chain("post_processor", *[TWICE] * 30),
    "decoder": chain("decoder", *[REPLACE] * 8),
}


@pytest.mark.parametrize("name", GROWING)
def test_tokenizer_that_never_ends_is_rejected(tmp_path, name):
    path = write(tmp_path, GROWING[name])
    with pytest.raises(UsageError, match=r"makes a text up to .* times as long, more than the 500"):
        hf_tokenizer.open_file(path)


PUBLISHED = {
    "GPT-2": ({"pre_tokenizer": BYTES, "decoder": SPACED, "post_processor": SPACED}, 30),
    "Llama 3": (chain("pre_tokenizer", LETTERS, BYTES) | chain("post_processor", SPACED, TWICE | {"single": []}), 30),
    "Llama 2": (chain("normalizer", {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "},
                                                                         "content": "▁"}), 12),
    "CLIP": (chain("normalizer", {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                   {"type": "Lowercase"}), 1),
    "ALBERT": (chain("normalizer", {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"},
                     {"type": "Lowercase"}, make_table("a", LONGEST), {"type": "Replace", "pattern": {"Regex": " {2,}"},
                                                                       "content": " "})
               | {"pre_tokenizer": METASPACE}, 132),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_of_published_tokenizers_are_accepted(name):
    steps, bound = PUBLISHED[name]
    assert bound_growth(steps) == bound < MAX_GROWTH


def test_no_chain_of_steps_exceeds_its_bound():
    """Normalizers and pre-tokenizers at random, on texts of the letters that they replace."""
    pick = random.Random(0)
    short = {"type": "Replace", "pattern": {"String": "a"}, "content": "b a"}
    joined = {"type": "Replace", "pattern": {"String": "ab"}, "content": "ﬁaa"}
    forms = [{"type": "NFKD"}, {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "éa"}]
    normalizers = [short, joined, SPACES, {"type": "ByteLevel"}, *forms]
    checked = 0
    for _ in range(300):
        steps = [pick.choice(normalizers) for _ in range(pick.randint(1, 4))]
        after = [pick.choice([LETTERS, METASPACE, BYTES, SPACED]) for _ in range(pick.randint(0, 3))]
        document = chain("normalizer", *steps) | chain("pre_tokenizer", *after)
        model = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).to_str())
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(model | document))
        text = "".join(pick.choice("ab  ") for _ in range(pick.randint(1, 30)))
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        length = sum(len(word.encode()) for word, _ in words)
        assert length <= bound_growth(document) * (len(text) + 1), document  # one more place for an insertion
        checked += length > len(text)
    assert checked > 200


def test_length_of_table_is_that_of_its_longest_text():
    assert bound_growth({"normalizer": make_table("a", LONGEST)}) == len(LONGEST.encode()) == 33
