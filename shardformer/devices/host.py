"""This machine's processor and the size of its memory's pages.

A step of CPU devices allocates memory for its activations and frees it. Linux clears each page at its first write,
after an interrupt. With pages of 4 KB instead of 2 MB this is a quarter of the time of a step with 400 MB of
activations.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # always, madvise (to programs that ask) or never
TUNABLES = "GLIBC_TUNABLES"
# An array in a separate mapping is at least partly in pages of 4 KB: drawing text with SmolLM2-135M took 1.1 to 1.4
# times as long. So an array below 32 MB comes from the heap. 32 and 64 MB are the most that glibc's own rule reaches.
HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"


def restart_with_huge_pages(arguments: list[str]) -> None:
    """Re-executes the command with HUGE_PAGES if the kernel setting is madvise and the user has set nothing."""
    if command := find_restart(arguments, sys.orig_argv, os.environ, SETTING):
        os.environ[TUNABLES] = HUGE_PAGES
        os.execv(command[0], command)


def find_restart(
    arguments: list[str], command: list[str], environment: Mapping[str, str], setting: Path
) -> list[str] | None:
    """Returns the command that repeats `command`, which ends with `arguments`; None if this process should go on."""
    started_as = command[: -len(arguments)]  # `python -m shardformer` or bin/shardformer
    is_command = Path(*started_as[-1:]).name == "shardformer"  # not a script or notebook, which would restart
    if is_command and TUNABLES not in environment and setting.exists() and "[madvise]" in setting.read_text():
        return [sys.executable, *command[1:]]
    return None


def describe_processor() -> str:
    """Returns a short hash of the processor's features, or of the machine's name if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        described = "".join(os.uname())
    return hashlib.sha256(described.encode()).hexdigest()[:12]
