"""The JSON lines of `generate`, on standard output or in a file that a later command continues."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from shardformer.cli.arguments import say
from shardformer.errors import UsageError
from shardformer.files import replacing

SETTINGS = ".settings.json"  # of the command that writes FILE, in FILE.settings.json until it is complete
PROGRESS_SECONDS = 10.0


class RecordOutput:
    """The records of one command. `done` counts the records that the file has."""

    def __init__(self, path: Path | None, settings: dict | None = None, prompts: list[str] | None = None, samples=1):
        self._path, self._total = path, len(prompts or []) * samples
        self.done = 0
        if path:
            digest = hashlib.sha256(json.dumps(prompts).encode("utf-8", "surrogatepass")).hexdigest()
            self.done = self._continue_file(path, (settings or {}) | {"prompts_sha256": digest})
        self._file = path.open("a", encoding="utf-8") if path else None
        self._started = self._printed = time.monotonic()
        self._first, self._tokens = self.done, 0

    def __enter__(self) -> "RecordOutput":
        return self

    def __exit__(self, kind, *_) -> None:
        if self._file and self._path:
            self._file.close()
            if kind is None and self.done == self._total:
                self._settings_path(self._path).unlink(missing_ok=True)

    def write(self, record: dict, tokens: int) -> None:
        if not self._file:
            say(json.dumps(record, ensure_ascii=not accepts_any_character(sys.stdout)))
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.done, self._tokens = self.done + 1, self._tokens + tokens
        self._show_progress()

    def _show_progress(self) -> None:
        now = time.monotonic()
        if self.done < self._total and now < self._printed + PROGRESS_SECONDS:
            return
        self._printed, seconds = now, max(now - self._started, 1e-9)
        left = (self._total - self.done) * seconds / (self.done - self._first)
        say(f"{self.done:,} of {self._total:,} texts, {self._tokens / seconds:,.0f} tokens/s, {left:,.0f} s left")

    @staticmethod
    def _settings_path(path: Path) -> Path:
        return path.with_name(path.name + SETTINGS)

    def _continue_file(self, path: Path, settings: dict) -> int:
        """Returns the number of complete lines, and removes an incomplete one; raises UsageError for another's file."""
        settings_path = self._settings_path(path)
        if not path.exists():
            with replacing(settings_path) as temporary:
                temporary.write_text(json.dumps(settings) + "\n", "utf-8")
            return 0
        try:
            known = json.loads(settings_path.read_text("utf-8"))
        except (OSError, ValueError):
            raise UsageError(
                f"out={path} exists, and no {settings_path.name} says that it is incomplete; name another file"
            ) from None
        if changed := [name for name in settings if known.get(name) != settings[name]]:
            raise UsageError(
                f"out={path} was begun with {changed[0]}={known.get(changed[0])!r:.60}, got "
                f"{settings[changed[0]]!r:.60}; give the same keys, or another file"
            )
        with open(path, "rb+") as file:
            content = file.read()
            end = content.rfind(b"\n") + 1
            file.truncate(end)
            os.fsync(file.fileno())
        return content.count(b"\n", 0, end)


def accepts_any_character(stream) -> bool:
    """Returns whether the stream is UTF-8, -16 or -32; others would emit escapes that JSON cannot parse."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
