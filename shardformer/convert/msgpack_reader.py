"""A reader of MessagePack that knows the heads of objects: what they contain is read, or skipped, by its caller.

The file is untrusted: no length is used before it is compared with the bytes that are left.
"""

import os
from pathlib import Path
from typing import BinaryIO

from shardformer.errors import RunError, UsageError

MAX_TEXT = 1000  # bytes of a string that is read
# The first byte of an object -> its kind, the bytes of its number or length, and whether that number is signed.
_HEADS = {
    0xC0: ("nil", 0), 0xC2: ("false", 0), 0xC3: ("true", 0),
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xC7: ("ext", 1), 0xC8: ("ext", 2), 0xC9: ("ext", 4),
    0xCA: ("float", 4), 0xCB: ("float", 8), 0xCC: ("int", 1), 0xCD: ("int", 2), 0xCE: ("int", 4), 0xCF: ("int", 8),
    0xD0: ("signed", 1), 0xD1: ("signed", 2), 0xD2: ("signed", 4), 0xD3: ("signed", 8),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4), 0xDC: ("array", 2), 0xDD: ("array", 4),
    0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class Reader:
    """A position in a file, and the heads that are read from there on."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self._file = path, file
        self.size, self.position = os.fstat(file.fileno()).st_size, file.tell()

    def read_head(self) -> tuple[str, int]:
        """Returns the kind of the next object, and its number, its length in bytes, or its count of objects."""
        (byte,) = self.take(1)
        if byte in _HEADS:
            kind, size = _HEADS[byte]
            number = self.take(size if kind != "float" else 0)
            kind, signed = ("int", True) if kind == "signed" else (kind, False)
            value = int.from_bytes(number, "big", signed=signed)
        elif byte in _FIXED_EXT:
            kind, value = "ext", _FIXED_EXT[byte]
        elif byte < 0x80 or byte >= 0xE0:
            kind, value = "int", byte if byte < 0x80 else byte - 0x100
        elif byte < 0xC0:
            kind, value = ("str", byte & 0x1F) if byte >= 0xA0 else ("array" if byte >= 0x90 else "map", byte & 0x0F)
        else:
            raise self.damaged(f"byte {self.position - 1} is {byte:#x}, which starts no object")
        if kind not in ("int", "float", "nil", "true", "false") and value > self.size - self.position:
            raise self.damaged(f"{kind} at byte {self.position} has {value:,} parts, and the file ends before")
        return kind, value

    def expect(self, *kinds: str) -> int:
        """Returns the number or length of the next object; rejects one of another kind."""
        start = self.position
        kind, value = self.read_head()
        if kind not in kinds:
            raise UsageError(f"{self.path} has a {kind} at byte {start}, and weights have a {' or '.join(kinds)} there")
        return value

    def read_text(self) -> str:
        length = self.expect("str", "bin")
        if length > MAX_TEXT:
            raise UsageError(f"{self.path} has a name of {length:,} bytes, more than the limit of {MAX_TEXT:,}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the name before byte {self.position} is not UTF-8") from None

    def take(self, count: int) -> bytes:
        content = self._file.read(count)
        self.position += count
        if len(content) < count:
            raise self.damaged(f"it ends at byte {self.size}, inside an object")
        return content

    def skip_to(self, position: int) -> None:
        self._file.seek(position)
        self.position = position

    def damaged(self, why: str) -> RunError:
        return RunError(f"{self.path} is damaged: {why}; copy it again")
