"""A token's position is where its text begins in the complete text, also among bytes that are no character."""

import random

import pytest

from shardformer.data.vocabulary import Bytes
from shardformer.inference.serve.text_offsets import TextOffsets


def offsets_of(content: bytes) -> list[int]:
    offsets = TextOffsets(lambda ids: bytes(ids).decode(errors="replace"))
    return [offsets.push(byte) for byte in content]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("aé😀b".encode(), [0, 1, 1, 2, 2, 2, 2, 3]),
        (b"\xc3a", [0, 1]),
        (b"\xc3\xc3\xa9\xff\xf0\x9f.", [0, 1, 1, 2, 3, 3, 4]),
        (b"", []),
    ],
)
def test_offsets_of_bytes(content, expected):
    assert offsets_of(content) == expected


def test_offsets_find_each_character():
    draw = random.Random(0)
    for _ in range(200):
        content = bytes(draw.choice([*b"ab", 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF]) for _ in range(40))
        text = content.decode(errors="replace")
        for byte, offset in zip(content, offsets_of(content), strict=True):
            assert byte >= 128 or text[offset] == chr(byte)


def test_token_without_a_text_has_the_next_position():
    offsets = TextOffsets(lambda ids: Bytes().decode([token for token in ids if token < 256]))
    assert [offsets.push(token) for token in (97, 300, 98, 300)] == [0, 1, 1, 2]
