"""Words and sequences of words as 64-bit hashes, of many documents at once.

A word is a run of letters and digits, in lower case (of ASCII). A character of three or four bytes of UTF-8 is a word,
as Chinese, Japanese and Thai have no spaces; punctuation separates words. The hashes depend only on the bytes.
"""

from typing import NamedTuple

import numpy as np

from shardformer.data.order import scramble

HASHED = 64  # bytes of a word that count, with its length: what is longer is no word of a language
EIGHT = 8  # bytes that are hashed as one integer
PADDING = bytes(HASHED + EIGHT)  # so that every read of EIGHT bytes is inside of the buffer
SPACE = 0x20
FACTOR = 0xD1342543DE82EF95  # odd, so that no power of it is 0 modulo 2**64
_TABLE = bytes(byte if chr(byte).isalnum() or byte >= 0x80 else SPACE for byte in bytes(range(256)).lower())
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(EIGHT + 1)], np.uint64)


class Words(NamedTuple):
    """The words of documents: the hash, the document, and the position in the joined bytes of each."""

    hashes: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def hash_words(documents: list[bytes]) -> Words:
    """Returns the words of all documents, in their order."""
    content = b"\n".join(documents)
    text = np.frombuffer(content.translate(_TABLE) + PADDING.translate(_TABLE), np.uint8)
    starts, ends = _find_words(text if content.isascii() else _separate_punctuation(text), content.isascii())
    sizes = np.fromiter(map(len, documents), np.int64, len(documents)) + 1
    words = np.diff(np.searchsorted(starts, np.cumsum(sizes)), prepend=0)
    documents_of_words = np.repeat(np.arange(len(documents), dtype=np.int32), words)
    return Words(_hash_bytes(text, starts, ends - starts), documents_of_words, starts, ends)


def hash_sequences(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hash of the `length` words from each position on, and whether all are in one document."""
    count = max(len(words.hashes) - length + 1, 0)
    is_inside = words.documents[:count] == words.documents[length - 1 :]
    return scramble(_join(words.hashes, length)), is_inside


def _join(hashes: np.ndarray, length: int) -> np.ndarray:
    """Returns a polynomial of `length` hashes from each position on, by halves."""
    if length == 1 or len(hashes) < length:
        return hashes[: max(len(hashes) - length + 1, 0)]
    first, second = length - length // 2, length // 2
    count = len(hashes) - length + 1
    power = np.uint64(pow(FACTOR, second, 1 << 64))
    return _join(hashes, first)[:count] * power + _join(hashes, second)[first : first + count]


def _separate_punctuation(text: np.ndarray) -> np.ndarray:
    """Returns the text with spaces for the signs of Latin-1, general punctuation and symbols, and CJK punctuation."""
    text = text.copy()
    for lead, second, size in ((0xC2, None, 2), (0xE2, None, 3), (0xE3, 0x80, 3)):
        positions = np.flatnonzero(text == lead)
        if second is not None:
            positions = positions[text[positions + 1] == second]
        for offset in range(size):
            text[positions + offset] = SPACE
    return text


def _find_words(text: np.ndarray, is_ascii: bool) -> tuple[np.ndarray, np.ndarray]:
    is_word = text != SPACE
    begins = is_word.copy()
    begins[1:] &= ~is_word[:-1]
    if not is_ascii:  # a character of three or four bytes begins a word, and what follows it
        for lead, size in ((0xE0, 3), (0xF0, 4)):
            positions = np.flatnonzero((text >= lead) & (text < lead + 0x10))
            begins[positions] = True
            begins[positions + size] = is_word[positions + size]
    ends = is_word.copy()
    ends[:-1] &= ~is_word[1:] | begins[1:]
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


def _hash_bytes(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a hash of the first HASHED bytes of each word and of its length."""
    at = np.ndarray(len(text) - EIGHT + 1, "<u8", text, strides=(1,))  # the integer at each byte
    hashes = scramble((at[starts] & _MASKS[np.minimum(lengths, EIGHT)]) ^ scramble(lengths))
    for offset in range(EIGHT, HASHED, EIGHT):
        longer = np.flatnonzero(lengths > offset)
        if not len(longer):
            break
        masks = _MASKS[np.minimum(lengths[longer] - offset, EIGHT)]
        hashes[longer] = scramble(hashes[longer] ^ (at[starts[longer] + offset] & masks))
    return hashes
