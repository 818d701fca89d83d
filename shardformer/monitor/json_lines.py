"""A file of JSON lines that each name a step; a resumed run continues after its first step."""

import json
from pathlib import Path

from shardformer.errors import RunError
from shardformer.files import read_text, replacing

MAX_BYTES = 1 << 30


class JsonLines:
    """The file at `path`; records after `first_step` are dropped when it is opened."""

    def __init__(self, path: Path, first_step: int):
        self._path = path
        lines = _read_lines(path) if first_step else []
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        if kept or path.exists():
            with replacing(path) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def append(self, record: dict) -> None:
        """Writes one line."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from None


def _read_lines(path: Path) -> list[str]:
    """Returns the complete lines; a line that a kill cut has no line feed."""
    try:
        return read_text(path, MAX_BYTES).split("\n")[:-1]
    except FileNotFoundError:
        return []
