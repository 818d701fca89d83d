"""Token ids as text, for a model whose tokens are not characters: id i is the i-th private-use character.

No keyboard types these, so that plain text is refused where a tokenizer's ids are meant.
"""

from collections.abc import Iterable

from shardformer.data import Vocabulary
from shardformer.errors import UsageError

PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
MOST = sum(map(len, PLANES))
_FIRST, _SECOND = PLANES


def ids_to_text(ids: Iterable[int]) -> str:
    """What stands for these ids in a prompt or a data file."""
    return "".join(map(_character, ids))


def text_to_ids(text: str) -> list[int]:
    """The ids that a text stands for, such as a sample's."""
    return [_id(ord(character)) for character in text]


def make_vocabulary(size: int) -> Vocabulary:
    if size > MOST:
        raise UsageError(f"a vocabulary of {size} tokens is more than the {MOST} that have a character")
    return Vocabulary(ids_to_text(range(size)))


def _character(token: int) -> str:
    if not 0 <= token < MOST:
        raise ValueError(f"token ids lie in 0..{MOST - 1}, got {token}")
    return chr(_FIRST[token] if token < len(_FIRST) else _SECOND[token - len(_FIRST)])


def _id(code: int) -> int:
    if code in _FIRST:
        return _FIRST.index(code)
    if code in _SECOND:
        return len(_FIRST) + _SECOND.index(code)
    raise ValueError(f"U+{code:04X} stands for no token id")
