"""Streamed pieces join to the text, and no piece has part of a stop string or of a character."""

import random

import pytest

from shardformer.data.vocabulary import Bytes
from shardformer.inference.sampling import Stops
from shardformer.inference.serve.text_stream import TextStream


def stream(text: bytes, strings=(), sizes=None):
    """Returns the pieces of a text of single bytes, `sizes` of which come together."""
    stops = Stops(Bytes(), strings, ends=())
    own, ids, pieces = TextStream(Bytes().decode, stops.cut, strings, frozenset()), list(text), []
    for size in sizes or [1] * len(ids):
        pieces.append(own.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, own.finish()]


@pytest.mark.parametrize(
    ("text", "strings", "pieces"),
    [
        (b"abc", [], ["a", "b", "c", ""]),
        ("aé".encode(), [], ["a", "", "é", ""]),
        (b"a\n\nb", ["\n\n"], ["a", "", "", "", ""]),
        (b"a\nb", ["\n\n"], ["a", "", "\nb", ""]),
        (b"aab", ["ab"], ["", "a", "", ""]),
        (b"ab", ["abc"], ["", "", "ab"]),
        (b"a\xff", [], ["a", "", "\N{REPLACEMENT CHARACTER}"]),
    ],
)
def test_pieces_are_certain(text, strings, pieces):
    assert stream(text, strings) == pieces


def test_pieces_join_to_the_text():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab\né😀") for _ in range(12)).encode() + bytes(rng.choices(range(256), k=3))
        strings = ["".join(rng.choice("ab\né") for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        sizes = [rng.randint(1, 3) for _ in range(len(text))]
        assert "".join(stream(text, strings, sizes)) == Stops(Bytes(), strings, ends=()).cut(list(text))
