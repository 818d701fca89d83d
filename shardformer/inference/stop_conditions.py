"""Where a generated text ends: before one of some strings, or with the id that separates documents."""

from collections.abc import Sequence

from shardformer.data import Vocabulary


class Stops:
    """For `Generator.continue_prompts`. `at_end`: whether the vocabulary's end of a text is the end of this one."""

    def __init__(self, vocabulary: Vocabulary, strings: Sequence[str] = (), at_end: bool = True):
        self._decode = vocabulary.decode
        self._strings = [string for string in strings if string]
        self._end = vocabulary.end_of_text if at_end else None

    def __call__(self, ids: list[int]) -> bool:
        """Whether the last of these ids ends the text."""
        if self._ends_document(ids):
            return True
        # A token has a byte at least; a few more tokens, as the first may be a part of a character.
        return any(string in self._decode(ids[-len(string.encode()) - 8 :]) for string in self._strings)

    def cut(self, ids: list[int]) -> str:
        """The text before what ended it."""
        text = self._decode(ids[:-1] if self._ends_document(ids) else ids)
        return text[: min((text.find(string) for string in self._strings if string in text), default=len(text))]

    def _ends_document(self, ids: list[int]) -> bool:
        return self._end is not None and ids[-1:] == [self._end]
