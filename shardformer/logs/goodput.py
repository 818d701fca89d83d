"""Goodput: what the wall time of a run was spent on, over all of its starts.

`goodput.csv` has the seconds of each kind so far. A resumed run adds the steps of the previous start that it repeats
to `lost`, and the time between the two starts to `waiting`. So the kinds add up to the wall time since the first start.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from shardformer.errors import RunError
from shardformer.logs.csv_file import CsvFile, Row, get_step

CATEGORIES = ("start", "compile", "data", "step", "evaluation", "save", "lost", "waiting")
COLUMNS = ("step", "time", *(f"{kind}_s" for kind in CATEGORIES))
COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


_ORIGIN = time.time() - time.monotonic()


def read_clock() -> float:
    """Returns seconds since 1970 that never jump: the system's clock may be set while a run trains."""
    return _ORIGIN + time.monotonic()


class Goodput:
    """A clock that charges every second to one kind: to `start` until `begin_steps`, then to `step` or to a block."""

    def __init__(self, clock: Callable[[], float] = read_clock):
        self._clock = clock
        self.restart()

    def restart(self, started: float | None = None) -> None:
        """Starts at zero seconds, at the time `started` or now."""
        self._kind, self._since = "start", self._clock() if started is None else started
        self.seconds, self._taken = dict.fromkeys(CATEGORIES, 0.0), dict.fromkeys(CATEGORIES, 0.0)
        self._file: CsvFile | None = None
        self._step = 0  # of the last row

    def begin_steps(self) -> None:
        """Charges the time from here on to `step`."""
        self._charge("step")

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Charges the time of the block to a kind."""
        around = self._charge(kind)
        try:
            yield
        finally:
            self._charge(around)

    @contextlib.contextmanager
    def noting_compilation(self) -> Iterator[None]:
        """Moves the seconds that JAX reports to `compile`, from the kind in which they passed.

        The seconds of other threads pass beside those that this clock charges.
        """
        thread = threading.get_ident()

        def move(event: str, duration_secs: float, **_) -> None:
            if event in COMPILING and threading.get_ident() == thread:
                self.seconds[self._kind] -= duration_secs
                self.seconds["compile"] += duration_secs

        jax.monitoring.register_event_duration_secs_listener(move)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(move)

    def take(self, kind: str) -> float:
        """Returns the seconds of a kind since the last call for it."""
        self._charge(self._kind)
        taken, self._taken[kind] = self.seconds[kind] - self._taken[kind], self.seconds[kind]
        return taken

    def continue_file(self, out: Path, step: int) -> None:
        """Adds the seconds of the run's previous starts, and writes to its goodput.csv from now on."""
        self._file = CsvFile(Path(out) / "goodput.csv", COLUMNS)
        with contextlib.suppress(FileNotFoundError, RunError):  # a record that cannot be read starts at zero
            if step and (rows := self._file.read()):
                self._add(rows, step)
        self._file.begin(0)
        self.write(step)

    def write(self, step: int) -> None:
        """Writes the seconds until now."""
        self._charge(self._kind)
        self._step = step
        if self._file:
            self._file.append({"step": step, "time": self._since} | {f"{k}_s": s for k, s in self.seconds.items()})

    def finish(self) -> str:
        """Writes the seconds until now at the last step, and returns the line that describes them."""
        with contextlib.suppress(RunError):  # the run is complete, and its folder may be gone or full
            self.write(self._step)
        return self.describe()

    def describe(self) -> str:
        """Formats the shares of the wall time in one line."""
        self._charge(self._kind)
        wall = sum(self.seconds.values())
        shares = (f"{kind} {seconds:.1f}" for kind, seconds in self.seconds.items() if seconds >= 0.05)
        return f"goodput {self.seconds['step'] / wall if wall else 0:.1%} of {wall:.1f} s: {', '.join(shares)}"

    def _add(self, rows: list[Row], step: int) -> None:
        """Adds a previous start's seconds: those after the resumed step are lost."""
        last = rows[-1]
        stored = next((row for row in reversed(rows) if get_step(row) <= step), rows[0])
        started = self._since - sum(self.seconds.values())
        for kind in CATEGORIES:
            self.seconds[kind] += stored[f"{kind}_s"] or 0.0
            self._taken[kind] += stored[f"{kind}_s"] or 0.0
            self.seconds["lost"] += (last[f"{kind}_s"] or 0.0) - (stored[f"{kind}_s"] or 0.0)
        self.seconds["waiting"] += max(started - (last["time"] or started), 0.0)

    def _charge(self, kind: str) -> str:
        """Charges the time since the last call to the current kind, and starts another; returns the one before."""
        now, before = self._clock(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before


CLOCK = Goodput()  # of this process, which trains one run at a time
