"""Words and sequences of words as 64-bit hashes, of many documents at once.

A word is a run of letters, marks and digits, in lower case. All else separates words. A character of a script without
spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer) is a word, as is an emoji. The hashes depend only on the bytes:
the kinds of characters are those of Unicode 3.2, which every Python has; later ones are letters.
"""

from typing import NamedTuple
from unicodedata import ucd_3_2_0

import numpy as np

from shardformer.data.order import scramble

HASHED = 64  # bytes of a word that count, with its length: what is longer is no word of a language
EIGHT = 8  # bytes that are hashed as one integer
PADDING = bytes(HASHED + EIGHT)  # so that every read of EIGHT bytes is inside of the buffer
SPACE = 0x20
CHARACTERS = 1 << 16  # with a kind; of those of four bytes, from the pictures (emoji) on each is a word
PICTURES = 0x1F000
WITHOUT_SPACES = (  # Thai and Lao, Burmese, Khmer, Japanese (two), Chinese (two)
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3040, 0x30FF), (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
)  # fmt: skip
FACTOR = 0xD1342543DE82EF95  # odd, so that no power of it is 0 modulo 2**64
_TABLE = bytes(byte if chr(byte).isalnum() or byte >= 0x80 else SPACE for byte in bytes(range(256)).lower())
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(EIGHT + 1)], np.uint64)


def _fold(code: int) -> int:
    """Returns the code in lower case if that has as many bytes, or that of a space for all but letters and digits."""
    kind, lower = ucd_3_2_0.category(chr(code)), chr(code).lower()
    if kind[0] in "PSZ" or kind in ("Cc", "Cf"):
        return SPACE
    return ord(lower) if kind == "Lu" and len(lower.encode()) == len(chr(code).encode()) else code


_FOLDED = np.array([_fold(code) for code in range(CHARACTERS)], np.int32)
_IS_A_WORD = np.zeros(CHARACTERS, bool)
for _first, _last in WITHOUT_SPACES:
    _IS_A_WORD[_first : _last + 1] = True


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
    borders: tuple[np.ndarray, ...] = ()
    if not content.isascii():
        text = text.copy()
        borders = _fold_characters(text)
    starts, ends = _find_words(text, *borders)
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


def _fold_characters(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Folds the characters of several bytes in the text; returns where those begin and end that are words."""
    begins, ends = [], []
    for lead, size in ((0xC0, 2), (0xE0, 3), (0xF0, 4)):
        positions = np.flatnonzero((text >= lead) & (text < lead + (0x20 if size == 2 else 0x10)))
        codes = text[positions].astype(np.int32) - lead
        for offset in range(1, size):
            codes = codes << 6 | text[positions + offset] & 0x3F
        if size == 4:
            is_word = codes >= PICTURES
        else:
            folded, is_word = _FOLDED[codes], _IS_A_WORD[codes] & (_FOLDED[codes] != SPACE)
            changed = np.flatnonzero(folded != codes)
            _write_characters(text, positions[changed], folded[changed], lead, size)
        begins.append(positions[is_word])
        ends.append(begins[-1] + size)
    return np.concatenate(begins), np.concatenate(ends)


def _write_characters(text: np.ndarray, positions: np.ndarray, codes: np.ndarray, lead: int, size: int) -> None:
    """Writes characters of `size` bytes; for a space, as many of them."""
    for offset in range(size):
        bits = codes >> 6 * (size - 1 - offset)
        text[positions + offset] = np.where(codes == SPACE, SPACE, bits & 0x3F | 0x80 if offset else bits | lead)


def _find_words(text: np.ndarray, *borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where words begin and end: at spaces, and at `borders` within a run of letters."""
    is_word = text != SPACE
    begins = is_word.copy()
    begins[1:] &= ~is_word[:-1]
    for positions in borders:
        begins[positions] = is_word[positions]
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
