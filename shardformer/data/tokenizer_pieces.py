"""Pieces of documents for Hugging Face tokenizers: offsets for a cut, and the encoding of the pieces after the first.

A cut changes no id if the pre-tokenizer separates there, or if no entry of the vocabulary crosses it. Many
tokenizers also put a space before a text; that prefix belongs to the first piece of a document only.
"""

import copy
import itertools
import re
from typing import TYPE_CHECKING

from shardformer.data.text_cuts import LINE, LINE_BEFORE_WORD, SPACE_BEFORE_WORD, Break, Breaks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words of many types: letters of different scripts, digits, code, marks, and some that few vocabularies know.
PROBES = ("a", "Zq", "hello", "foo bar", "42", "x = 1", "_", "-", "/", "//", ".", ");", "'s", "{", "#", "<", "é",
          "日本",
          "ж", "\u0301", "\u1680a", "ᚠ", "\U0001d7fc", "😀", "ﬁ", "İ")  # fmt: skip
LINE_FEEDS, SPACES = "\nĊ", " Ġ▁"  # as such and as byte-level and SentencePiece vocabularies write them
WHITE = LINE_FEEDS + SPACES + "\t\rĉč"
# Entries of a vocabulary that cross an offset where a text would be cut.
CROSSING = {
    LINE: re.compile(rf"[{LINE_FEEDS}][^{WHITE}]"),
    LINE_BEFORE_WORD: re.compile(rf"[{LINE_FEEDS}](?:[^\W_]|[^\x00-\x7f{WHITE}])"),
    SPACE_BEFORE_WORD: re.compile(rf"[^{WHITE}][{SPACES}]"),
}


def list_unknown(post_processor: dict | None, size: int) -> list[str]:
    """Returns the tokens that a post-processor puts around a text without an id below `size`; Rust panics on some."""
    if not post_processor:
        return []
    if post_processor["type"] == "Sequence":
        return [token for each in post_processor["processors"] for token in list_unknown(each, size)]
    if post_processor["type"] != "TemplateProcessing":
        return []
    known = post_processor["special_tokens"]
    put = [piece["SpecialToken"]["id"] for piece in post_processor["single"] if "SpecialToken" in piece]
    return [token for token in put if token not in known or max(known[token]["ids"], default=0) >= size]


def find_breaks(first: "Tokenizer", continuation: "Tokenizer") -> Breaks:
    """Returns the patterns at which a text may be cut; `continuation` encodes all pieces but the first."""
    lines = [kind for kind in (LINE, LINE_BEFORE_WORD) if _is_safe(kind, first, continuation)]
    spaces = [SPACE_BEFORE_WORD] if _is_safe(SPACE_BEFORE_WORD, first, continuation) else []
    return (*lines[:1], *spaces)


def _is_safe(kind: Break, first: "Tokenizer", continuation: "Tokenizer") -> bool:
    pairs = list(_make_probes(kind))
    try:
        whole = _encode(first, [before + after for before, after in pairs])
        starts = _encode(first, [before for before, _ in pairs])
        rests = _encode(continuation, [after for _, after in pairs])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # of a tokenizer that does not know every text; a panic of Rust is no Exception
        return False
    if any(ids != begin + rest for ids, begin, rest in zip(whole, starts, rests, strict=True)):
        return False
    if first.pre_tokenizer is not None and all(_is_separated(first, *pair) for pair in pairs):
        return True
    return not any(CROSSING[kind].search(entry) for entry in first.get_vocab(with_added_tokens=True))


def _make_probes(kind: Break) -> list[tuple[str, str]]:
    """Returns samples in two parts, which may be cut between them by this kind of break."""
    probes = []
    for left, right in itertools.product(PROBES, PROBES):
        text = f"{left} {right}" if kind is SPACE_BEFORE_WORD else f"{left}\n{right}"
        border = len(left) + (kind is not SPACE_BEFORE_WORD)
        if any(match.end() == border for match in kind.text.finditer(text)):
            probes.append((text[:border], text[border:]))
    return probes


def _is_separated(tokenizer: "Tokenizer", before: str, after: str) -> bool:
    """Returns whether the pre-tokenizer starts a word between two parts of a text."""
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    words = tokenizer.pre_tokenizer.pre_tokenize_str(normalise(before + after))
    return any(start == len(normalise(before)) for _, (start, _) in words)


def _encode(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def remove_prefix(document: dict) -> dict:
    """Returns a tokenizer.json that puts no space in front."""
    result = copy.copy(document)
    result["normalizer"] = _remove_from_normalizer(document.get("normalizer"))
    result["pre_tokenizer"] = _remove_from_pre_tokenizer(document.get("pre_tokenizer"))
    return result


def _remove_from_normalizer(step: dict | None) -> dict | None:
    if step and step.get("type") == "Sequence":
        return step | {
            "normalizers": [retained for it in step["normalizers"] if (retained := _remove_from_normalizer(it))]
        }
    return None if step and step.get("type") == "Prepend" else step


def _remove_from_pre_tokenizer(step: dict | None) -> dict | None:
    if not step:
        return step
    if step.get("type") == "Sequence":
        return step | {"pretokenizers": [_remove_from_pre_tokenizer(it) for it in step["pretokenizers"]]}
    if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
        return step | {"add_prefix_space": False}
    if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
        return {name: value for name, value in step.items() if name != "add_prefix_space"} | {"prepend_scheme": "never"}
    return step
