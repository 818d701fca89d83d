"""The host's memory in pages of 2 MB instead of 4 KB.

A step of CPU devices allocates memory for its activations and frees it. Linux clears each page at its first write,
after an interrupt. With pages of 4 KB this is a quarter of the time of a step with 400 MB of activations.
"""

import os
import sys
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # always, madvise (to programs that ask) or never
TUNABLES = "GLIBC_TUNABLES"


def restart_with_huge_pages(words: list[str]) -> None:
    """Re-executes the command of these arguments with glibc huge pages if the kernel setting is madvise.

    glibc reads its settings when a process starts. Settings of the user are not changed.
    """
    started_as = sys.orig_argv[: -len(words)]  # `python -m shardformer` or bin/shardformer
    is_command = Path(*started_as[-1:]).name == "shardformer"  # not a script or notebook, which would start again
    if is_command and TUNABLES not in os.environ and SETTING.exists() and "[madvise]" in SETTING.read_text():
        os.environ[TUNABLES] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
