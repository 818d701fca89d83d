"""`profile=FROM:TO`: a trace of these steps by JAX's profiler, in OUT/profile; TensorBoard and Perfetto open it."""

from collections.abc import Callable
from pathlib import Path

import jax

from shardformer.messages import log


class StepProfiler:
    """The profiler of a range of steps. A failure is printed and does not end the run."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._first, self._last = steps or (0, 0)
        self._folder = folder
        self._running = False

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._last)

    def begin(self, step: int) -> None:
        """Starts the trace before its first step, or at the first step of a run that resumes within the range."""
        if not self._running and self._first <= step <= self._last:
            self._running = self._try(lambda: jax.profiler.start_trace(self._folder))

    def end(self, step: int) -> None:
        """Stops the trace after its last step."""
        if self._running and step >= self._last:
            self._running, self._last = False, 0
            if self._try(jax.profiler.stop_trace):
                log.info(f"profile: the trace up to step {step} is in {self._folder}, for TensorBoard or Perfetto")

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
            return True
        except Exception as error:
            self._last = 0
            log.info(f"the profile failed: {error}; training continues")
            return False
