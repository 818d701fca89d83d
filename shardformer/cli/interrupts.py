"""Ctrl-C as the end of the process: an exception may come where nobody passes it on."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn


def leave(*_: object) -> NoReturn:
    """Ends the process at once; an orderly exit could crash threads of XLA that still compile."""
    # A RuntimeError means that the signal interrupted another call of the same stream.
    with contextlib.suppress(OSError, RuntimeError):
        print("shardformer: interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError):
            stream.flush()
    os._exit(1)


@contextlib.contextmanager
def leaving_at_once(
    signals: tuple[int, ...] = (signal.SIGINT,), clean_up: Callable[[], object] | None = None
) -> Iterator[None]:
    """Within the block, a signal cleans up and ends the process: JAX's callbacks swallow a KeyboardInterrupt."""

    def end(*_: object) -> NoReturn:
        if clean_up:
            clean_up()
        leave()

    before = {number: signal.signal(number, end) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
