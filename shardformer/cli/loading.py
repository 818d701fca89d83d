"""Opens a corpus and shows the progress if its documents have to be tokenised first."""

import sys
import time

from shardformer import data
from shardformer.config import Config
from shardformer.data import Corpus, Vocabulary
from shardformer.tables import format_bytes

SMALL = 1_000_000  # bytes of which only the end is printed


def load_corpus(config: Config, vocabulary: Vocabulary | None = None, *, resumes: bool = False) -> Corpus:
    """Opens the data of a config and shows the progress; see `data.load_corpus`."""
    with ShownProgress() as progress:
        return data.load_corpus(config, vocabulary, progress.show, resumes=resumes)


class ShownProgress:
    """The progress of work on bytes: one line of a terminal that is rewritten, else a line for every tenth."""

    def __init__(self, verb: str = "tokenised"):
        self._verb = verb
        self._started, self._printed, self._on_terminal = time.monotonic(), -1.0, sys.stdout.isatty()

    def __enter__(self) -> "ShownProgress":
        return self

    def __exit__(self, *_) -> None:
        if self._on_terminal and 0 <= self._printed < 1:
            print()

    def show(self, done: int, total: int) -> None:
        if not done:
            self._started = time.monotonic()
        now, share = time.monotonic() - self._started, done / max(total, 1)
        step = 0.0 if self._on_terminal else 0.1
        if share < 1 and (total < SMALL or (self._printed >= 0 and share < self._printed + step)):
            return
        self._printed = share
        left = f", {now / share - now:,.0f} s left" if 0 < share < 1 else ""
        line = f"{self._verb} {format_bytes(done)} of {format_bytes(total)} in {now:,.0f} s{left}"
        stays = share == 1 or not self._on_terminal
        print(f"\r\x1b[K{line}" if self._on_terminal else line, end="\n" if stays else "", flush=True)
