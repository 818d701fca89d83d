"""Programs that another thread compiles before their first call, while this thread compiles or runs others.

XLA compiles without the interpreter's lock, mostly on one core. JAX's `jit` calls a program that was lowered for the
types and shardings of its arguments, and compiles none again. For others it compiles as if there were no thread.
"""

import contextlib
import os
import threading
from collections.abc import Callable

import jax

from shardformer.devices import programs


class EarlyCompilation:
    """A thread that lowers and compiles; `wait` before the first call."""

    def __init__(self, compile_programs: Callable[[], object]):
        def run() -> None:
            with contextlib.suppress(Exception):  # the first call repeats it, and raises there
                compile_programs()

        self._thread = threading.Thread(target=run, name="compile early")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()


def saves_time() -> bool:
    """Returns whether a thread may compile: on two cores or more, and where no processes must agree on programs.

    On a GPU, XLA measures kernels while it compiles, which programs that run would disturb.
    """
    if jax.process_count() > 1 or programs.has_store() or jax.default_backend() == "gpu":
        return False
    return (os.cpu_count() or 1) > 1
