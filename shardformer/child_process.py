"""The environment of processes that this one starts."""

import os
import sys
from pathlib import Path


def make_environment() -> dict[str, str]:
    """Returns the environment of a Python process that finds every package that this one finds.

    A child process does not inherit sys.path, which a notebook may have extended.
    """
    paths = [str(Path(__file__).resolve().parents[1]), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path))}
