"""When this process began its command: before the imports of JAX and TensorFlow, which take seconds."""

import time

_began: float | None = None


def note_start() -> None:
    """Notes the time at which the command of this process began."""
    global _began
    _began = time.time()


def take_start() -> float | None:
    """Returns the noted time once, to the first run of the process."""
    global _began
    taken, _began = _began, None
    return taken
