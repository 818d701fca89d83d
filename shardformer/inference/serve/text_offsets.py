"""The positions of tokens in their text, as they come."""

from collections.abc import Callable

from shardformer.inference.serve.text_stream import AGAIN, INCOMPLETE


class TextOffsets:
    """Counts the characters before each token; all tokens of one character have its position.

    Bytes that become no character count as the replacement characters that the text has for them.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode, self._last, self._length = decode, list[int](), 0

    def push(self, token: int) -> int:
        """Returns the position of one more token."""
        before, after = self._decode(self._last), self._decode([*self._last, token])
        pairs = enumerate(zip(before, after, strict=False))
        start = next((n for n, (a, b) in pairs if a != b), min(len(before), len(after)))
        if start == len(after) and before.endswith(INCOMPLETE):
            start -= 1  # another byte of the same character
        position = self._length - len(before) + start
        self._length += len(after) - len(before)
        self._last = [*self._last, token][-AGAIN:]
        return position
