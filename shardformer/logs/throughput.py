"""Tokens per second of training, without evaluations and checkpoints, and the most memory that a run has used."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import jax


class Throughput:
    """A meter of tokens per second, pauses excluded, and of the seconds of the full run."""

    def __init__(
        self,
        tokens_per_step: int,
        first_step: int,
        elapsed_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._origin = clock() - elapsed_before
        self._step = first_step
        self._since: float | None = None
        self._paused = 0.0

    def begin(self, step: int) -> None:
        """Starts measuring; call it after the first step, which compiles."""
        self._step, self._since, self._paused = step, self._clock(), 0.0

    def measure(self, step: int) -> float | None:
        """Returns tokens per second since the previous call or `begin`; None before the first `begin` or call."""
        now = self._clock()
        seconds = None if self._since is None else now - self._since - self._paused
        tokens = (step - self._step) * self._tokens_per_step
        self._step, self._since, self._paused = step, now, 0.0
        return tokens / seconds if seconds and seconds > 0 and tokens > 0 else None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the block. Wait for the steps in flight first, or their time is excluded as well."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - max(start, self._since or start)

    def elapsed(self) -> float:
        """Returns the seconds of the loop, summed over resumes, without the time before the loop started."""
        return self._clock() - self._origin


def measure_peak_bytes() -> int:
    """Returns the peak bytes of the fullest device here, or of the process if devices report none (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
