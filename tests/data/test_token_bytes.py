"""The bytes of tokens join to the text that the tokenizer decodes."""

import contextlib
import random

import pytest

from shardformer.data.token_bytes import list_token_bytes
from shardformer.data.vocabulary import Bytes, Characters, TokenIds

families = pytest.importorskip("tests.data.chat.families")

from tests.data.chat.chatml_bytes import make_vocabulary  # noqa: E402
from tests.data.chat.test_chat_families import open_family  # noqa: E402

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])  # byte-level, and pieces with a fallback to bytes
def test_bytes_join_to_the_text(name, tmp_path):
    vocabulary, _ = open_family(name, tmp_path)
    texts, draw = vocabulary.token_bytes(), random.Random(0)
    assert len(texts) == len(vocabulary)
    known = [number for number, text in enumerate(texts) if text]
    assert {text[0] for text in texts if len(text) == 1} >= set(range(32, 127))
    compared = 0
    for _ in range(300):
        ids = draw.choices(known, k=4)
        with contextlib.suppress(UnicodeDecodeError):  # decoders replace the bytes of no character each in its way
            assert b"".join(texts[n] for n in ids).decode() == vocabulary.decode(ids)
            compared += 1
    assert compared > 20


def test_special_tokens_have_none():
    vocabulary = make_vocabulary()
    assert vocabulary.token_bytes()[-2:] == [b"", b""]
    assert sorted(vocabulary.token_bytes())[2:] == [bytes([byte]) for byte in range(256)]


def test_own_vocabularies():
    assert Bytes().token_bytes()[65:67] == [b"A", b"B"]
    assert Bytes().token_bytes()[256] == b""
    assert Characters("aé").token_bytes() == [b"a", "é".encode()]
    assert TokenIds(5).token_bytes() is None


@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ([REPLACE, FALLBACK, FUSE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}], True),
        ([REPLACE, FALLBACK, FUSE, {"type": "Strip", "content": " ", "start": 0, "stop": 1}], False),
        ([REPLACE, FALLBACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}, FUSE], False),
        ([REPLACE | {"pattern": {"Regex": "▁+"}}, FALLBACK, FUSE], False),
        ([REPLACE, FALLBACK, FUSE, {"type": "Replace", "pattern": {"String": "aa"}, "content": "b"}], False),
        ([REPLACE, FALLBACK, FUSE, {"type": "Replace", "pattern": {"String": "b"}, "content": "c"}], True),
        ([FALLBACK, FUSE, REPLACE], False),  # bytes of two or more entries may be the letter
        ([REPLACE, FUSE, FALLBACK], False),
    ],
)
def test_decoders_that_change_entries_by_their_place(steps, known):
    document = {"decoder": {"type": "Sequence", "decoders": steps}}
    assert list_token_bytes(document, {"▁a": 0, "<0xC3>": 1}, 2) == ([b" a", b"\xc3"] if known else None)
