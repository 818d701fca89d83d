"""The host's memory, in pages of 2 MB rather than 4 KB.

A step of CPU devices takes fresh memory for its activations and gives it back. Linux clears each page of it when it is
first written, after an interrupt, which in pages of 4 KB is a quarter of the time of a step with 400 MB of them.
"""

import os
import sys
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # always, madvise (to programs that ask) or never
TUNABLES = "GLIBC_TUNABLES"


def restart_with_huge_pages(words: list[str]) -> None:
    """Starts this command, which has these words, again with a malloc that asks for huge pages, where Linux has them
    for those who ask: glibc reads its settings when a process starts. A user's own settings are left alone.
    """
    started_as = sys.orig_argv[: -len(words)]  # `python -m shardformer` or bin/shardformer
    is_command = Path(*started_as[-1:]).name == "shardformer"  # and no script or notebook, which would begin once more
    if is_command and TUNABLES not in os.environ and SETTING.exists() and "[madvise]" in SETTING.read_text():
        os.environ[TUNABLES] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
