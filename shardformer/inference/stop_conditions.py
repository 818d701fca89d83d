"""Conditions that end a generated text: a string, or an id that ends texts."""

from collections.abc import Collection, Sequence

from shardformer.data import Vocabulary


class Stops:
    """A condition for `Generator`: the text holds one of `strings`, or its last id is one of `ends`.

    By default the only end is the vocabulary's end of text.
    """

    def __init__(self, vocabulary: Vocabulary, strings: Sequence[str] = (), ends: Collection[int] | None = None):
        self._decode = vocabulary.decode
        self._strings = [string for string in strings if string]
        local = [] if vocabulary.end_of_text is None else [vocabulary.end_of_text]
        self._ends = frozenset(local if ends is None else ends)

    def __call__(self, ids: list[int]) -> bool:
        """Returns whether the last of these ids ends the text."""
        if ids and ids[-1] in self._ends:
            return True
        # A token has at least one byte. The extra tokens are for a first one that is part of a character.
        return any(string in self._decode(ids[-len(string.encode()) - 8 :]) for string in self._strings)

    def cut(self, ids: list[int]) -> str:
        """Returns the text before the end."""
        return cut_text(self._decode(ids[:-1] if ids and ids[-1] in self._ends else ids), self._strings)


def cut_text(text: str, strings: Sequence[str]) -> str:
    """Returns the text before the first of `strings`."""
    return text[: min((text.find(string) for string in strings if string and string in text), default=len(text))]
