"""The start of a command: its time, seconds before JAX and TensorFlow are imported, and that it is a command at all."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

LONGEST_AGE = 600  # seconds; a longer start is a /proc that counts otherwise
STARTED = "SHARDFORMER_STARTED"  # in the environment: seconds since 1970
STAT = Path("/proc/self/stat")
_started: float | None = None
_is_command = False


def note_start(age: float | None = None, clock: Callable[[], float] = time.time) -> None:
    """Notes the time at which this process started, `age` seconds ago; None: as long ago as the system says."""
    global _started, _is_command
    _started = clock() - (measure_age() if age is None else age)
    _is_command = True


def is_command() -> bool:
    """Returns whether this process is a command; otherwise it is a program or a notebook of the user."""
    return _is_command


def take_start() -> float | None:
    """Returns the noted time once, to the first run of the process."""
    global _started
    taken, _started = _started, None
    return taken


def measure_age(stat: Path = STAT) -> float:
    """Returns the seconds since this process started, over an exec too; 0 without Linux's /proc.

    A script that installs, and is then replaced by the trainer, sets STARTED to the end of the installation.
    """
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    with contextlib.suppress(KeyError, ValueError):
        age = min(age, max(time.time() - float(os.environ[STARTED]), 0.0))
    return age if 0 <= age <= LONGEST_AGE else 0.0
