"""The end of a call in a text that grows."""

import re


class ClosingSearch:
    """Searches a text for its first closing outside of strings. Each character is read once."""

    def __init__(self, closing: str, quotes: str = ""):
        """quotes: the characters that begin and end strings, in which a backslash comes before any other character."""
        self.quotes = quotes
        self._closing, self._place = closing, 0
        self._outside = re.compile("|".join(map(re.escape, (closing, *quotes))))
        self._quote = ""  # of the string at the place

    def find(self, text: str) -> int:
        """Returns the position after the closing in a longer text than before; -1 if it has none."""
        while self._place < len(text):
            pattern = re.compile(f"{self._quote}|\\\\") if self._quote else self._outside
            match = pattern.search(text, self._place)
            if not match:
                # The last characters may begin a closing.
                self._place = len(text) if self._quote else max(self._place, len(text) - len(self._closing) + 1)
                return -1
            self._place = match.end()
            if match[0] == self._closing:
                return match.end()
            if match[0] != "\\":
                self._quote = "" if self._quote else match[0]
            elif self._place == len(text):
                self._place = match.start()
                return -1
            else:
                self._place += 1
        return -1
