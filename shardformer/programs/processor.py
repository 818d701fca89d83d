"""The processor of this machine, for which programs are compiled."""

import hashlib
import os
from pathlib import Path


def describe_processor() -> str:
    """Returns a short hash of the processor's features, or of the machine's name if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        described = "".join(os.uname())
    return hashlib.sha256(described.encode()).hexdigest()[:12]
