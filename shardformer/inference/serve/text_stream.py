"""The text of a continuation as its tokens come: what is sent is never taken back."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
AGAIN = 8  # tokens that are decoded again with new ones: a tokenizer may join or strip what follows a border


class TextStream:
    """Pieces of a text, up to the last complete character and before anything that may become a stop string.

    decode: of ids to text. cut: of all ids to the text before its end.
    """

    def __init__(self, decode: Callable, cut: Callable[..., str], stops: Sequence[str], ends: frozenset[int]):
        self._decode, self._cut, self._stops, self._ends = decode, cut, stops, ends
        self._ids: list[int] = []
        self._read = 0  # ids whose text is in `_text`
        self._text, self._sent = "", 0

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that new ids make certain."""
        self._ids += ids
        start = max(self._read - AGAIN, 0)
        known = [token for token in self._ids[start : self._read] if token not in self._ends]
        every = known + [token for token in self._ids[self._read :] if token not in self._ends]
        before, text = self._decode(known), self._decode(every)
        if not text.endswith(INCOMPLETE) and text.startswith(before):
            self._text += text[len(before) :]
            self._read = len(self._ids)
        visible = self._text[: measure_before(self._text, self._stops)]
        new = visible[self._sent :]
        self._sent = max(self._sent, len(visible))
        return new

    def finish(self) -> str:
        """Returns the rest of the text."""
        return self._cut(self._ids)[self._sent :]


def measure_before(text: str, strings: Sequence[str]) -> int:
    """Returns the length of the text before the first of `strings`, or before what may be the first part of one."""
    found = [text.find(string) for string in strings if string in text]
    for length in range(min(max(map(len, strings), default=0), len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return min([len(text) - length, *found])
    return min([len(text), *found])
