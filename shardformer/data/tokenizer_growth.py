"""An upper bound of the text that the steps of a tokenizer.json make of a text.

Eight replacements of one letter by twenty, one after the other, would make 25 GB of each letter. The package that
runs the steps cannot be interrupted.
"""

import base64
import math
import re
import unicodedata
from typing import Any

MAX_GROWTH = 500  # published tokenizers: up to 132, of SentencePiece's table of characters and its prefix
# Patterns without a match of no characters, which would insert between any two characters.
_CONSUMING = re.compile(r"((\[[^\[\]]+\]|\\[sSdDwWnrt]|[^\\\[\]{}()*+?|^$])(\+|\{[1-9]\d*(,\d*)?\})?)+")
_SMALL = {"BertNormalizer": 2, "WordPiece": 2, "BPEDecoder": 2, "CTC": 2}  # spaces around characters or tokens


def bound_growth(document: dict) -> float:
    """Returns the most bytes that encoding or decoding makes of one byte."""
    encoding = (_bound(document.get(part)) for part in ("normalizer", "pre_tokenizer", "post_processor"))
    return max(math.prod(encoding), _bound(document.get("decoder")))


def _bound(step: Any) -> float:
    """Returns the bound of a step; a step that makes text longer only once, such as NFKC, counts as 1."""
    if not isinstance(step, dict):
        return 1
    kind = step.get("type")
    if kind == "Sequence":
        return math.prod(_bound(inner) for value in step.values() if isinstance(value, list) for inner in value)
    if kind == "Replace":
        return _bound_replacement(step["pattern"], _measure(step["content"]))
    if kind == "Prepend":
        return 1 + _measure(step["prepend"])
    if kind == "Precompiled":
        return _bound_table(base64.b64decode(step["precompiled_charsmap"]))
    if kind == "ByteLevel":
        return 5 + bool(step.get("add_prefix_space"))  # ¼ stands for a byte, and has 5 bytes in NFKD
    if kind == "Metaspace":
        return 1 + _measure(step.get("replacement", "▁"))
    if kind == "TemplateProcessing":
        return max(1, sum("Sequence" in piece for piece in step["single"]))
    return _SMALL.get(str(kind), 1)


def _bound_replacement(pattern: dict, size: int) -> float:
    if text := pattern.get("String"):
        return max(1, size / len(text.encode()))
    return max(1, size) + (not _CONSUMING.fullmatch(pattern.get("Regex", "")))


def _bound_table(table: bytes) -> int:
    """Returns the longest text of SentencePiece's table: the size of a trie, the trie, and texts that end with a 0."""
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(_measure(text.decode(errors="replace")) for text in texts))


def _measure(text: str) -> int:
    """Returns the bytes of a text in the longest form that a later step may give it."""
    return max(len(form.encode()) for form in (text, unicodedata.normalize("NFKD", text).lower()))
