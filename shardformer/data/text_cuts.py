"""The places where a text may be cut, and the sizes of the pieces."""

import dataclasses
import re
from typing import NamedTuple


class Limits(NamedTuple):
    """The sizes in which texts are read, and those that no text has."""

    piece: int = 1 << 16  # characters that are encoded as one; thousands of them keep all cores busy
    range: int = 16 << 20  # bytes of a plain file that are read as one
    ids: int = 8 << 20  # ids of a token file that are read as one
    look_ahead: int = 1 << 20  # bytes in which a break is searched for, before a text is cut elsewhere
    in_memory: int = 16 << 20  # bytes of one text that is tokenised at every start rather than cached
    waiting: int = 1 << 20  # characters of a packed text that wait for a break
    uncut: int = 64 << 20  # characters of a document that is encoded in one piece: Rust needs 100 bytes a token
    line: int = 256 << 20  # bytes of a .jsonl file's line
    empty_lines: int = 1 << 20


LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Break:
    """A pattern where a text may be cut: at the end of each match of `text`."""

    text: re.Pattern[str]
    candidates: re.Pattern[bytes]  # of the same positions in UTF-8, and of more

    def find(self, content: bytes) -> int | None:
        """Returns the first match behind the first byte of a UTF-8 text."""
        for result in self.candidates.finditer(content, 1):
            end = result.end()
            before = content[max(end - 5, 0) : end].decode("utf-8", "ignore")[-2:]
            after = content[end : end + 5].decode("utf-8", "ignore")[:2]
            if any(match.end() == len(before) for match in self.text.finditer(before + after)):
                return end
        return None


Breaks = tuple[Break, ...]

# A line break between two letters, a line break before a word, and the space before a word.
LINE = Break(re.compile(r"(?<=\S)\n(?=\S)"), re.compile(rb"(?<=[^\s])\n(?=[^\s])"))
LINE_BEFORE_WORD = Break(re.compile(r"(?<=\S)\n(?=[^\W_])"), LINE.candidates)
SPACE_BEFORE_WORD = Break(re.compile(r"(?<=[^\W_])(?= [^\W_])"), re.compile(rb"(?<=[^\s])(?= [^\s])"))
LINE_BREAKS: Breaks = (LINE,)


def cut_text(text: str, breaks: Breaks = LINE_BREAKS, size: int = 0) -> list[str]:
    """Divides a text into pieces of at least `size` characters; the last break is searched for without limit."""
    size, pieces, start = size or LIMITS.piece, [], 0
    while breaks and len(text) - start > 2 * size:
        near = (kind.text.search(text, start + size, start + size + LIMITS.look_ahead) for kind in breaks[:-1])
        result = next(filter(None, near), None) or breaks[-1].text.search(text, start + size)
        if not result:
            break
        pieces.append(text[start : result.end()])
        start = result.end()
    return [*pieces, text[start:]]
