"""Waits of tests for other threads and processes. A busy machine may stop any of them for many seconds."""

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds; a test that passes waits for its event only


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Waits until a condition holds; fails if it does not within the seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
