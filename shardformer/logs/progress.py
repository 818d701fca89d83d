"""What a person sees while a run trains: a live display on a terminal, plain aligned lines anywhere else."""

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardformer.tables import format_number

_SECONDS_BETWEEN_LINES = 2
_SECONDS_BETWEEN_EVALUATION_LINES = 10
_REFRESHES_PER_SECOND = 4
_SHORTEST_BAR = 5
_COMPILING = "compiling the step"


class Meter:
    """Tokens per second of training alone, and the seconds of the whole run."""

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
        """Measures from here: for the moment when the first step, which compiles, is done."""
        self._step, self._since, self._paused = step, self._clock(), 0.0

    def rate(self, step: int, now: float | None = None) -> float | None:
        """Tokens per second since the previous call or `begin`; None if nothing has been measured."""
        now = self._clock() if now is None else now
        seconds = None if self._since is None else now - self._since - self._paused
        tokens = (step - self._step) * self._tokens_per_step
        self._step, self._since, self._paused = step, now, 0.0
        return tokens / seconds if seconds and seconds > 0 and tokens > 0 else None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is not training. Wait for the steps in flight first, or their time is left out as well."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - max(start, self._since or start)

    def elapsed(self) -> float:
        """Since the loop began, over every resume: what is read, made and compiled before the loop is not in it."""
        return self._clock() - self._origin


class Silent:
    """For the processes of a run whose output nobody reads; also what every progress can do."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def step(self, row: dict) -> None:
        """A logged step, with its row of metrics."""

    def advance(self, step: int) -> None:
        """Any step has been done."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """`done` of `total` batches of an evaluation are done."""

    def message(self, text: str) -> None:
        """Anything else that the person should read."""


class Progress(Silent):
    """Shows a run that continues from `first_step`; `best` is its lowest validation loss so far: (step, loss)."""

    def __init__(
        self,
        steps: int,
        first_step: int,
        tokens_per_step: int,
        elapsed_before: float = 0.0,
        stream=None,
        best: tuple[int, float] | None = None,
    ):
        self._run = _Run(steps, first_step, tokens_per_step, elapsed_before, best)
        stream = _Tolerant(sys.stdout if stream is None else stream)
        on_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._display = (_Terminal if on_terminal else _Lines)(self._run, stream)

    def __enter__(self) -> "Progress":
        self._display.open()
        return self

    def __exit__(self, *_) -> None:
        self._display.close()

    def step(self, row: dict) -> None:
        self._run.log(row)
        self._display.logged(evaluated=row.get("val_loss") is not None)

    def advance(self, step: int) -> None:
        self._run.advance(step)

    def evaluating(self, what: str, done: int, total: int) -> None:
        begins = not self._run.activity
        self._run.activity = f"{what} {done}/{total}" if done < total else ""
        self._display.evaluating(begins)

    def message(self, text: str) -> None:
        self._display.message(text)


class _Run:
    """What is known about the run, whatever shows it."""

    def __init__(self, steps, first_step, tokens_per_step, elapsed_before, best):
        self.steps = steps
        self.step = first_step
        self.best = best
        self.row: dict = {}  # of the step that was logged last
        self.latest: dict = {}  # each number as it was last known
        self.activity = _COMPILING if first_step < steps else ""  # what keeps the steps waiting
        self._tokens_per_step = tokens_per_step
        self._origin = time.monotonic() - elapsed_before
        self._compiled: tuple[int, float] | None = None  # the first step that was done, and when

    def advance(self, step: int) -> None:
        self.step = step
        self.activity = ""
        if self._compiled is None:
            self._compiled = step, time.monotonic()

    def log(self, row: dict) -> None:
        self.row = {key: value for key, value in row.items() if value is not None}
        self.advance(int(self.row["step"]))
        self.latest |= self.row
        loss = self.row.get("val_loss", math.nan)
        if loss < (self.best[1] if self.best else math.inf):
            self.best = self.step, loss

    @property
    def is_best(self) -> bool:
        return self.best is not None and "val_loss" in self.row and self.best[0] == self.step

    def elapsed(self) -> float:
        return time.monotonic() - self._origin

    def seconds_per_step(self) -> float | None:
        """With the evaluations and checkpoints in between, which the steps to come will have too."""
        if self._compiled is None or self.step <= self._compiled[0]:
            return None
        return (time.monotonic() - self._compiled[1]) / (self.step - self._compiled[0])

    def left(self) -> float | None:
        pace = self.seconds_per_step()
        return None if pace is None else pace * (self.steps - self.step)

    def tokens_per_s(self) -> float | None:
        pace = self.seconds_per_step()
        return self.latest.get("tokens_per_s", self._tokens_per_step / pace if pace else None)


# Heading, width with the gap before it, and what stands there. 80 columns in all, with the mark of a best loss.
_LINE = (
    ("step", 7, lambda run: str(run.step)),
    ("loss", 9, lambda run: format_number(run.row.get("loss"))),
    ("val loss", 10, lambda run: format_number(run.row.get("val_loss"))),
    ("grad norm", 11, lambda run: format_number(run.row.get("grad_norm"))),
    ("lr", 9, lambda run: _short(run.row.get("lr"))),
    ("tokens/s", 11, lambda run: _count(run.row.get("tokens_per_s"))),
    ("elapsed", 9, lambda run: _duration(run.elapsed())),
    ("left", 9, lambda run: _duration(run.left())),
)


def _header(width: int = 80) -> str:
    return _cut([heading.rjust(size) for heading, size, _ in _LINE], width)


def _line(run: _Run, width: int = 80) -> str:
    return _cut([*(cell(run).rjust(size) for _, size, cell in _LINE), " best" if run.is_best else ""], width)


def _cut(cells: list[str], width: int) -> str:
    """As many whole cells, from the first, as fit."""
    ends = itertools.accumulate(map(len, cells))
    return "".join(cell for cell, end in zip(cells, ends, strict=True) if end <= width)


class _Lines:
    """Plain lines: of all evaluated steps, the first and the last, and of as many others as one can read."""

    def __init__(self, run: _Run, stream):
        self._run = run
        self._stream = stream
        self._unprinted = False
        self._printed_at = -math.inf  # a line of the table
        self._signed_at = math.inf  # a sign of life of the evaluation that goes on, or its beginning

    def open(self) -> None:
        if self._run.activity:
            self.message(f"{self._run.activity}\n{_header()}")

    def close(self) -> None:
        if self._unprinted:
            self._print_line()

    def logged(self, evaluated: bool) -> None:
        waited = time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES
        self._unprinted = True
        if evaluated or waited or self._run.step >= self._run.steps:
            self._print_line()

    def evaluating(self, begins: bool) -> None:
        now = time.monotonic()
        if begins:
            self._signed_at = now
        elif self._run.activity and now - self._signed_at >= _SECONDS_BETWEEN_EVALUATION_LINES:
            self._signed_at = now
            self.message(self._run.activity)

    def message(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _print_line(self) -> None:
        self._unprinted = False
        self._printed_at = time.monotonic()
        self.message(_line(self._run))


class _Terminal:
    """Two lines that stay at the bottom, the bar and the numbers; evaluated steps scroll by above them."""

    def __init__(self, run: _Run, stream):
        self._run = run
        self._headed = False
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False, markup=False)
        # It redraws by itself, so that the clock runs on through a long compilation, and a step costs nothing.
        self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND)

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._run.activity = ""
        self._live.stop()

    def logged(self, evaluated: bool) -> None:
        if evaluated:
            if not self._headed:
                self._console.print(_header(self._console.width), style="dim")
            self._headed = True
            self._console.print(_line(self._run, self._console.width), style="green" if self._run.is_best else None)

    def evaluating(self, begins: bool) -> None:
        if begins:
            self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _draw(self) -> Group:
        width = self._console.width
        return Group(self._bar(width), _joined(self._numbers(), width))

    def _bar(self, width: int) -> Table:
        run = self._run
        pieces = [
            ("step", f"{run.step}/{run.steps}", "bold"),
            ("", _duration(run.elapsed()), "cyan"),
            ("", run.activity or _and(_duration(run.left()), "left"), ""),
            ("", _and(_count(run.tokens_per_s()), "tokens/s"), "cyan"),
        ]
        text = _joined(pieces, width - _SHORTEST_BAR - 1)
        bar = ProgressBar(total=max(run.steps, 1), completed=run.step, width=max(width - text.cell_len - 1, 1))
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(bar, text)
        return line

    def _numbers(self) -> list[tuple[str, str, str]]:
        latest, best = self._run.latest, self._run.best
        return [
            ("loss", format_number(latest.get("loss")), "bold"),
            ("val", format_number(latest.get("val_loss")), "bold"),
            ("best", f"{format_number(best[1])} @{best[0]}" if best else "", "green"),
            ("grad", format_number(latest.get("grad_norm")), ""),
            ("lr", _short(latest.get("lr")), ""),
        ]


def _joined(pieces: list[tuple[str, str, str]], width: int) -> Text:
    """Label, value and style of each piece that has a value: as many, from the first, as fit."""
    line = Text(no_wrap=True, overflow="crop")
    for label, value, style in pieces:
        piece = Text.assemble((_and(label, ""), "dim"), (value, style))
        gap = "  " if line else ""
        if line.cell_len + len(gap) + piece.cell_len > width:
            break
        if value:
            line.append(gap).append_text(piece)
    return line


def _and(text: str, more: str) -> str:
    return f"{text} {more}" if text else ""


class _Tolerant:
    """A stream whose reader may go away (`| head`, a closed terminal) without ending the training."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # a sample's letters on a terminal that has only ASCII
            return self._stream.write(text.encode("ascii", "backslashreplace").decode())
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._discard()

    def _discard(self) -> None:
        # What is buffered, and what others print there, goes nowhere too, instead of failing when Python exits.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
