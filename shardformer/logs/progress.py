"""The progress of a run: a live display on a terminal, plain aligned lines elsewhere."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlCode, ControlType
from rich.table import Table
from rich.text import Text

from shardformer.tables import format_number

_SECONDS_BETWEEN_LINES = 2
_SECONDS_BETWEEN_EVALUATION_LINES = 10
_REFRESHES_PER_SECOND = 4
_SHORTEST_BAR = 5
_COMPILING = "compiling the step"
_SPEED = "speed"  # stands for the heading that names the unit
NO_BEST = 0, math.inf


class NoProgress:
    """The silent progress of all processes but the first, and the interface of `Progress`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show_row(self, row: dict, best: tuple[int, float] = NO_BEST) -> None:
        """Shows the metrics of a logged step, and the (step, loss) of the best checkpoint after it."""

    def advance(self, step: int) -> None:
        """Marks a step as done, logged or not."""

    def show_evaluation(self, split: str, done: int, total: int) -> None:
        """Shows that `done` of `total` batches of an evaluation are done."""

    def show_message(self, text: str) -> None:
        """Shows any other message to the user."""


class Progress(NoProgress):
    """The progress of a run that continues from `first_step`.

    Arguments:
      best: (step, loss) of the best checkpoint.
      metrics: names of the metrics that only the run's objective has.
      unit: what a step has `tokens_per_step` of.
    """

    def __init__(
        self,
        steps: int,
        first_step: int,
        tokens_per_step: int,
        elapsed_before: float = 0.0,
        stream: TextIO | None = None,
        best: tuple[int, float] = NO_BEST,
        with_mfu: bool = False,
        metrics: tuple[str, ...] = (),
        unit: str = "tokens",
    ):
        extra = next((columns for name, columns in _COLUMNS_OF_OBJECTIVES.items() if name in metrics), ())
        columns = (*_insert_columns(extra), *((_MFU,) if with_mfu else ()))
        self._run = _RunState(steps, first_step, tokens_per_step, elapsed_before, best, columns, extra, unit)
        stream = sys.stdout if stream is None else stream
        on_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._display = (_Terminal if on_terminal else _Lines)(self._run, stream)

    def __enter__(self) -> Self:
        self._display.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()

    def show_row(self, row: dict, best: tuple[int, float] = NO_BEST) -> None:
        self._run.add_row(row, best)
        self._display.show_row(evaluated=row.get("val_loss") is not None)

    def advance(self, step: int) -> None:
        self._run.advance(step)

    def show_evaluation(self, split: str, done: int, total: int) -> None:
        starts = not self._run.activity
        self._run.activity = f"{split} {done}/{total}" if done < total else ""
        self._display.show_activity(starts)

    def show_message(self, text: str) -> None:
        self._display.show_message(text)


class _RunState:
    """The values that a display shows."""

    def __init__(
        self,
        steps: int,
        first_step: int,
        tokens_per_step: int,
        elapsed_before: float,
        best: tuple[int, float],
        columns: tuple,
        extra: tuple,
        unit: str,
    ):
        self.columns, self.extra, self.unit = columns, extra, unit
        self.steps = steps
        self.step = first_step
        self.best = best
        self.row: dict = {}  # of the last logged step
        self.latest: dict = {}  # the last known value of each number
        self.activity = _COMPILING if first_step < steps else ""  # displayed while no step runs
        self._tokens_per_step = tokens_per_step
        self._origin = time.monotonic() - elapsed_before
        self._compiled: tuple[int, float] | None = None  # the first step, which compiles, and the time of its end

    def advance(self, step: int) -> None:
        self.step = step
        self.activity = ""
        if self._compiled is None:
            self._compiled = step, time.monotonic()

    def add_row(self, row: dict, best: tuple[int, float]) -> None:
        self.row = {key: value for key, value in row.items() if value is not None}
        self.advance(int(self.row["step"]))
        self.latest |= self.row
        self.best = best

    @property
    def is_best(self) -> bool:
        return "val_loss" in self.row and self.best[0] == self.step

    def elapsed(self) -> float:
        return time.monotonic() - self._origin

    def seconds_per_step(self) -> float | None:
        """Includes evaluations and checkpoints, as the remaining steps will have them too."""
        if self._compiled is None or self.step <= self._compiled[0]:
            return None
        return (time.monotonic() - self._compiled[1]) / (self.step - self._compiled[0])

    def seconds_left(self) -> float | None:
        pace = self.seconds_per_step()
        return None if pace is None else pace * (self.steps - self.step)

    def tokens_per_s(self) -> float | None:
        pace = self.seconds_per_step()
        return self.latest.get("tokens_per_s", self._tokens_per_step / pace if pace else None)


# Heading, width with the gap before it, and the cell's text. 80 columns in all, with the mark of a best loss.
_COLUMNS = (
    ("step", 7, lambda run: str(run.step)),
    ("loss", 9, lambda run: format_number(run.row.get("loss"))),
    ("val loss", 10, lambda run: format_number(run.row.get("val_loss"))),
    ("grad norm", 11, lambda run: format_number(run.row.get("grad_norm"))),
    ("lr", 9, lambda run: _format_rate(run.row.get("lr"))),
    (_SPEED, 11, lambda run: _format_count(run.row.get("tokens_per_s"))),
    ("elapsed", 9, lambda run: _format_duration(run.elapsed())),
    ("left", 9, lambda run: _format_duration(run.seconds_left())),
)
# Only if the peak of the chip is known; the line is wider then.
_MFU = ("MFU", 6, lambda run: _format_share(run.row.get("mfu")))
_LINE_WIDTH = 86


def _insert_columns(extra: tuple) -> tuple:
    """Returns the columns of a run with those of its objective."""

    def make_cell(name: str, form: Callable) -> Callable:
        return lambda run: form(run.row.get(name))

    cells = [(heading, width, make_cell(name, form)) for heading, width, name, form in extra]
    return (*_COLUMNS[:3], *cells, _COLUMNS[3], *_COLUMNS[-2:]) if extra else _COLUMNS


def _format_header(run: _RunState, width: int = _LINE_WIDTH) -> str:
    headings = [f"{run.unit}/s" if heading == _SPEED else heading for heading, *_ in run.columns]
    return _join_whole_cells([it.rjust(size) for it, (_, size, _) in zip(headings, run.columns, strict=True)], width)


def _format_line(run: _RunState, width: int = _LINE_WIDTH) -> str:
    cells = [cell(run).rjust(size) for _, size, cell in run.columns]
    return _join_whole_cells([*cells, " best" if run.is_best else ""], width)


def _join_whole_cells(cells: list[str], width: int) -> str:
    """Joins as many of the first cells as fit the width."""
    ends = itertools.accumulate(map(len, cells))
    return "".join(cell for cell, end in zip(cells, ends, strict=True) if end <= width)


class _Lines:
    """The display of plain lines: all evaluated steps, the first, the last, and one every two seconds."""

    def __init__(self, run: _RunState, stream: TextIO):
        self._run = run
        self._stream = stream
        self._unprinted = False
        self._printed_at = -math.inf  # time of the last line of the table
        self._reported_at = math.inf  # time of the last line about the evaluation under way

    def open(self) -> None:
        if self._run.activity:
            self.show_message(f"{self._run.activity}\n{_format_header(self._run)}")

    def close(self) -> None:
        if self._unprinted:
            self._print_line()

    def show_row(self, evaluated: bool) -> None:
        waited = time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES
        self._unprinted = True
        if evaluated or waited or self._run.step >= self._run.steps:
            self._print_line()

    def show_activity(self, starts: bool) -> None:
        now = time.monotonic()
        if starts:
            self._reported_at = now
        elif self._run.activity and now - self._reported_at >= _SECONDS_BETWEEN_EVALUATION_LINES:
            self._reported_at = now
            self.show_message(self._run.activity)

    def show_message(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _print_line(self) -> None:
        self._unprinted = False
        self._printed_at = time.monotonic()
        self.show_message(_format_line(self._run))


class _EraseWrappedLines(RenderHook):
    """A hook of the console that erases the rows that a display gains when its terminal becomes narrower.

    Rich erases as many rows as it has drawn lines, but terminals wrap those lines to the new width.
    """

    def __init__(self, console: Console):
        self._console = console
        self.widths: list[int] = []  # of the lines of the last display

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = self._console.width
        added = sum((max(drawn, 1) - 1) // width for drawn in self.widths)
        if not added:
            return renderables
        erase_one: list[ControlCode] = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        return [Control(*erase_one * added), *renderables]


class _Terminal:
    """The live display: a bar and the latest metrics at the bottom; evaluated steps scroll above them."""

    def __init__(self, run: _RunState, stream: TextIO):
        self._run = run
        self._headed = False
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False, markup=False)
        # Live redraws in its thread, so the clock advances during a long compilation and a step costs nothing.
        self._live = Live(self, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND)
        self._eraser = _EraseWrappedLines(self._console)

    def open(self) -> None:
        self._console.push_render_hook(self._eraser)  # before that of Live, which pops the last one when it stops
        self._live.start()

    def close(self) -> None:
        self._run.activity = ""
        self._live.stop()
        self._console.pop_render_hook()

    def show_row(self, evaluated: bool) -> None:
        if evaluated:
            if not self._headed:
                self._console.print(_format_header(self._run, self._console.width), style="dim")
            self._headed = True
            line = _format_line(self._run, self._console.width)
            self._console.print(line, style="green" if self._run.is_best else None)

    def show_activity(self, starts: bool) -> None:
        if starts:
            self._live.refresh()

    def show_message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures = _join_labelled(self._list_values(), options.max_width)
        self._eraser.widths = [options.max_width, figures.cell_len]
        yield self._draw_bar(options.max_width)
        yield figures

    def _draw_bar(self, width: int) -> Table:
        run = self._run
        pieces = [
            ("step", f"{run.step}/{run.steps}", "bold"),
            ("", _format_duration(run.elapsed()), "cyan"),
            ("", run.activity or _append_word(_format_duration(run.seconds_left()), "left"), ""),
            ("", _append_word(_format_count(run.tokens_per_s()), f"{run.unit}/s"), "cyan"),
            ("", _append_word(_format_share(run.latest.get("mfu")), "MFU"), "cyan"),
        ]
        text = _join_labelled(pieces, width - _SHORTEST_BAR - 1)
        bar = ProgressBar(total=max(run.steps, 1), completed=run.step, width=max(width - text.cell_len - 1, 1))
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(bar, text)
        return line

    def _list_values(self) -> list[tuple[str, str, str]]:
        latest, best = self._run.latest, self._run.best
        return [
            ("loss", format_number(latest.get("loss")), "bold"),
            ("val", format_number(latest.get("val_loss")), "bold"),
            ("best", f"{format_number(best[1])} @{best[0]}" if best[0] else "", "green"),
            *((heading, form(latest.get(name)), "") for heading, _, name, form in self._run.extra),
            ("grad", format_number(latest.get("grad_norm")), ""),
            ("lr", _format_rate(latest.get("lr")), ""),
        ]


def _join_labelled(pieces: list[tuple[str, str, str]], width: int) -> Text:
    """Joins pieces of (label, value, style) with a value, as many of the first as fit the width."""
    line = Text(no_wrap=True, overflow="crop")
    for label, value, style in pieces:
        piece = Text.assemble((_append_word(label, ""), "dim"), (value, style))
        gap = "  " if line else ""
        if line.cell_len + len(gap) + piece.cell_len > width:
            break
        if value:
            line.append(gap).append_text(piece)
    return line


def _append_word(text: str, more: str) -> str:
    return f"{text} {more}" if text else ""


def _format_rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _format_count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


# Heading, width, metric and format of the columns that replace the rate and the speed, by a metric of the objective.
_COLUMNS_OF_OBJECTIVES: dict[str, tuple] = {
    "reward_margin": (
        ("margin", 9, "reward_margin", format_number),
        ("right", 7, "accuracy", _format_share),
        ("val right", 10, "val_accuracy", _format_share),
    ),
    "reward": (
        ("reward", 9, "reward", format_number),
        ("kl", 9, "kl", format_number),
        ("tokens", 8, "answer_length", format_number),
    ),
    "kl": (("kl", 9, "kl", format_number),),
}
