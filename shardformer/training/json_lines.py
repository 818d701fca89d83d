"""A file of JSON lines that each name a step; a resumed run continues after its first step."""

import json
from pathlib import Path

from shardformer.errors import RunError
from shardformer.files import read_bytes, replacing

MAX_BYTES = 1 << 30


class JsonLines:
    """The file at `path`; records after `first_step` are dropped when it is opened."""

    def __init__(self, path: Path, first_step: int):
        self._path = path
        self._unwritten = b""
        retained = _read_lines(path, first_step) if first_step else []
        if retained or path.exists():
            with replacing(path) as temporary:
                temporary.write_bytes(b"".join(line + b"\n" for line in retained))

    def append(self, record: dict) -> None:
        """Writes one line. Lines that a full disk rejects stay pending until the next call."""
        self._unwritten += json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from None


def _read_lines(path: Path, last_step: int) -> list[bytes]:
    """Returns the lines up to a step; a last line without its line feed was cut by a kill."""
    try:
        lines = read_bytes(path, MAX_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [line for number, line in enumerate(lines, start=1) if _read_step(path, number, line) <= last_step]


def _read_step(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise RunError(
            f"{path}, line {number}, is not a record with a step: {line[:200].decode(errors='replace')!r}; "
            "remove that line to continue"
        ) from None
