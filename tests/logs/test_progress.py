"""The display of a run: on terminals of different widths, in a pipe, and after the pipe closes."""

import contextlib
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console, ConsoleDimensions

from shardformer.logs import progress
from shardformer.logs.progress import NoProgress, Progress
from shardformer.logs.throughput import Throughput
from shardformer.objectives.policy_model import PolicyLoss
from shardformer.objectives.preference_model import PairLoss

RUN = """
import sys
from shardformer.logs.progress import Progress
from shardformer.logs.streams import lasting_output
with lasting_output(), Progress(steps=1250, first_step=0, tokens_per_step=768) as shown:
    shown.show_message("[mesh] 4x2 \\u2014 caf\\u00e9")
    best = 0, float("inf")
    for step in range(1, 1251):
        shown.advance(step)
        if step % 50 == 0:
            row = {"step": step, "loss": 2.5, "grad_norm": 0.4321, "lr": 9.1e-4, "tokens_per_s": 104912.0}
            if step % 500 == 0:
                shown.show_evaluation("validation", 3, 38)
                best = step, 2.0 - step / 10_000
                row["val_loss"] = best[1]
            shown.show_row(row, best)
"""


# Lines in a pipe come every two seconds: a run that is stopped meanwhile would print more of them.
WITHOUT_PAUSES = f"import time\ntime.monotonic = lambda: 100.0\n{RUN}"


def on_terminal(width, program=RUN, **environment):
    """Returns everything that a program writes to a terminal of that many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    inherited = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=inherited | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment,
    )  # fmt: skip
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # raised by Linux once the other side is closed
        pass
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


def drawn_lines(written):
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written))


def is_coloured(written):
    codes = [int(code) for codes in re.findall(r"\x1b\[([0-9;]*)m", written) for code in codes.split(";") if code]
    return any(30 <= code <= 49 or 90 <= code <= 107 for code in codes)


@pytest.mark.parametrize("width", [120, 80])
def test_a_terminal_shows_everything(width):
    written = on_terminal(width)
    lines = drawn_lines(written)
    assert "[mesh] 4x2 \u2014 caf\u00e9" in lines
    assert max(map(len, lines)) <= width
    last = "\n".join(lines[-3:])
    for piece in ("step 1250/1250", "left", "loss 2.5000", "val 1.9000", "best 1.9000 @1000", "grad 0.4321",
                  "lr 9.10e-04", "104,912 tokens/s"):  # fmt: skip
        assert piece in last
    assert any("validation 3/38" in line for line in lines)
    evaluated = [line for line in lines if line.endswith("best")]
    assert [line.split()[:3] for line in evaluated] == [["500", "2.5000", "1.9500"], ["1000", "2.5000", "1.9000"]]
    assert is_coloured(written)
    assert written.endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(
    ("width", "numbers"), [(50, "loss 2.5000  val 1.9000  best 1.9000 @1000"), (24, "loss 2.5000  val 1.9000")]
)
def test_a_narrow_terminal_drops_columns_and_never_wraps(width, numbers):
    lines = [line for line in drawn_lines(on_terminal(width)) if "mesh" not in line]
    assert max(map(len, lines)) <= width
    assert any("step 1250/1250" in line for line in lines)
    assert numbers in [line.rstrip() for line in lines]
    assert not any("tokens/s" in line for line in lines)


class WrappingTerminal(io.StringIO):
    """A terminal that wraps its lines to a new width, as most do; it reads the control sequences of the display."""

    def __init__(self, width):
        super().__init__()
        self.rows, self.row, self.column, self.width = [""], 0, 0, width

    def isatty(self):
        return True

    def write(self, text):
        for control, letter, character in re.findall(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", text):
            if letter == "A":
                self.row -= int(control)
            elif letter == "K":
                self.rows[self.row] = ""
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            elif character:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1
        return len(text)

    def resize(self, width):
        wrapped = [[line[at : at + width] for at in range(0, len(line), width)] or [""] for line in self.rows]
        above = sum(map(len, wrapped[: self.row]))
        self.row, self.column = above + max(self.column - 1, 0) // width, self.column % width
        self.rows, self.width = [row for rows in wrapped for row in rows], width


@pytest.mark.parametrize("widths", [(70, 50, 30), (60, 24, 100), (100, 120, 41)])
def test_resized_terminal_shows_one_bar(monkeypatch, widths):
    terminal = WrappingTerminal(100)
    monkeypatch.setattr(Console, "size", property(lambda _: ConsoleDimensions(terminal.width, 24)))
    monkeypatch.setattr(progress, "_REFRESHES_PER_SECOND", 1e-3)  # the test refreshes
    monkeypatch.setenv("TERM", "xterm")
    with Progress(1000, 0, 768, stream=terminal) as shown:
        shown.show_message("a line above")
        shown.show_row({"step": 1, "loss": 2.5, "lr": 1e-3})
        for width in widths:
            terminal.resize(width)
            shown._display._live.refresh()
            terminal.resize(width)
            shown.show_message(f"now {width}")
    assert [row.rstrip() for row in terminal.rows if row.startswith(("a line", "now"))] == [
        "a line above", *(f"now {width}" for width in widths)
    ]  # fmt: skip
    assert sum("step 1/1000" in row for row in terminal.rows) == 1
    assert len(terminal.rows) == 1 + len(widths) + 3  # with the bar, its figures and the line of the cursor


def test_no_color_and_ascii_terminals():
    written = on_terminal(80, NO_COLOR="1", PYTHONIOENCODING="ascii:backslashreplace")
    assert not is_coloured(written)
    assert written.isascii()
    assert "[mesh] 4x2 \\u2014 caf\\xe9" in written


def test_a_dumb_terminal_gets_plain_lines():
    written = on_terminal(80, WITHOUT_PAUSES, TERM="dumb")
    assert "\x1b" not in written
    first_words = [line.split()[0] for line in drawn_lines(written) if line]
    assert first_words == ["compiling", "step", "[mesh]", "50", "500", "1000", "1250"]


def test_a_pipe_gets_plain_lines_whatever_the_colour_settings():
    environment = os.environ | {"FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", WITHOUT_PAUSES]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    doing, header, message, *lines = result.stdout.splitlines()
    assert (doing, message) == ("compiling the step", "[mesh] 4x2 \u2014 caf\u00e9")
    assert header.split() == ["step", "loss", "val", "loss", "grad", "norm", "lr", "tokens/s", "elapsed", "left"]
    assert [int(line.split()[0]) for line in lines] == [50, 500, 1000, 1250]
    assert {len(line.removesuffix(" best")) for line in lines} == {len(header)}


def test_training_goes_on_when_the_reader_goes_away():
    script = RUN + "    print('more')\n    sys.stdout.flush()\nprint('done', file=sys.stderr)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"done\n"
    process.stderr.close()
    assert process.wait() == 0


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def printed_steps(stream):
    return [int(words[0]) for words in map(str.split, stream.getvalue().splitlines()) if words[0].isdecimal()]


def test_plain_lines_every_two_seconds_and_evaluation(clock):
    stream = io.StringIO()
    with Progress(100, 0, 768, stream=stream) as shown:
        for step in range(1, 101):
            clock.now += 0.25
            shown.show_row({"step": step, "loss": 1.0, "val_loss": 1.0 if step in (20, 21) else None})
    assert printed_steps(stream) == [1, 9, 17, 20, 21, 29, 37, 45, 53, 61, 69, 77, 85, 93, 100]


@pytest.mark.parametrize(
    ("metrics", "line", "figures"),
    [
        (PairLoss._fields[3:], ["0.5000", "75.0%", "0.4321"], "margin 0.5000  right 75.0%"),
        (PolicyLoss._fields[3:], ["0.6000", "0.0100", "12.0000", "0.4321"], "reward 0.6000  kl 0.0100  tokens 12.0000"),
        (("kl",), ["0.0100", "0.4321"], "kl 0.0100"),
        ((), ["0.4321", "1.00e-03"], "loss 1.0000  grad 0.4321"),
    ],
)
def test_objective_has_its_columns(metrics, line, figures, monkeypatch):
    known = {"reward_margin": 0.5, "reward": 0.6, "kl": 0.01, "answer_length": 12.0}
    row = {"step": 1, "loss": 1.0, "accuracy": 0.75, "grad_norm": 0.4321, "lr": 1e-3}
    row |= {name: known[name] for name in metrics if name in known}
    stream = io.StringIO()
    with Progress(100, 0, 768, stream=stream, metrics=metrics) as shown:
        shown.show_row(row)
    _, header, last = stream.getvalue().splitlines()
    assert last.split()[2 : 2 + len(line)] == line
    assert len(last) == len(header) <= 81
    terminal = WrappingTerminal(100)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(100, 0, 768, stream=terminal, metrics=metrics) as shown:
        shown.show_row(row)
    assert any(figures in row for row in terminal.rows)


@pytest.mark.parametrize("unit", ["tokens", "rows"])
def test_speed_is_named_by_its_unit(clock, unit):
    stream = io.StringIO()
    with Progress(100, 0, 768, stream=stream, unit=unit) as shown:
        shown.show_row({"step": 10, "loss": 2.5})
    assert f" {unit}/s " in stream.getvalue()


def test_mfu_has_a_column_if_the_peak_is_known(clock):
    for known in (True, False):
        stream = io.StringIO()
        with Progress(100, 0, 768, stream=stream, with_mfu=known) as shown:
            row = {"step": 1, "loss": 1.0, "val_loss": 1.0, "mfu": 0.4321 if known else None}
            shown.show_row(row, best=(1, 1.0))
        _, header, line = stream.getvalue().splitlines()
        assert (header.split()[-1] == "MFU") == known
        assert line.endswith(" 43.2% best" if known else " best")


def test_compilation_is_announced_at_once():
    stream = io.StringIO()
    with Progress(100, 10, 768, stream=stream):
        doing, header = stream.getvalue().splitlines()
    assert (doing, header.split()[0]) == ("compiling the step", "step")


def test_a_run_with_nothing_left_has_no_table():
    stream = io.StringIO()
    with Progress(100, 100, 768, stream=stream) as shown:
        shown.show_message("nothing left to train")
    assert stream.getvalue() == "nothing left to train\n"


def test_the_last_line_of_an_interrupted_run_is_printed(clock):
    stream = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt), Progress(100, 0, 768, stream=stream) as shown:
        for step in (1, 2, 3):
            shown.show_row({"step": step, "loss": 1.0})
        raise KeyboardInterrupt
    assert printed_steps(stream) == [1, 3]


def test_a_long_evaluation_gives_a_sign_of_life(clock):
    stream = io.StringIO()
    with Progress(100, 0, 768, stream=stream) as shown:
        shown.show_row({"step": 1, "loss": 1.0})
        for done in range(40):
            shown.show_evaluation("test", done, 40)
            clock.now += 1
    assert [line for line in stream.getvalue().splitlines() if "test" in line] == [
        "test 10/40",
        "test 20/40",
        "test 30/40",
    ]


def test_a_short_evaluation_before_the_first_line_says_nothing(clock):
    stream = io.StringIO()
    with Progress(410, 400, 768, stream=stream) as shown:
        clock.now += 30  # the first step compiles
        shown.advance(410)
        for done in range(1, 74):
            shown.show_evaluation("validation", done, 73)
        shown.show_row({"step": 410, "loss": 1.0, "val_loss": 1.5})
    assert "validation" not in stream.getvalue()
    assert printed_steps(stream) == [410]


@pytest.mark.parametrize(
    ("seconds", "shown_as"), [(36_000, "10:00:00"), (86_399, "23:59:59"), (86_400, "1d 0h"), (8_690_400, "100d 14h")]
)
def test_columns_stay_apart_in_long_runs(clock, seconds, shown_as):
    stream = io.StringIO()
    with Progress(seconds + 1, 0, 768, elapsed_before=seconds - 1, stream=stream) as shown:
        shown.advance(0)
        clock.now += 1
        shown.show_row(
            {"step": 1, "loss": 2e5, "val_loss": 2e5, "grad_norm": 2e5, "lr": 1e-4, "tokens_per_s": 12_345_678}
        )
    header, line = (line.removesuffix(" best") for line in stream.getvalue().splitlines()[1:])
    assert len(line) == len(header)
    assert line.endswith(f"2.00e+05 1.00e-04 12,345,678 {shown_as:>8} {shown_as:>8}")


def test_elapsed_spans_resumes_and_left_excludes_compilation(clock):
    stream = io.StringIO()
    with Progress(1000, 500, 768, elapsed_before=3600.0, stream=stream) as shown:
        clock.now += 60  # the first step compiles
        shown.advance(501)
        clock.now += 10
        shown.show_row({"step": 511, "loss": 1.0})
    assert stream.getvalue().splitlines()[-1].split() == ["511", "1.0000", "1:01:10", "8:09"]


def test_evaluated_step_of_the_best_checkpoint_is_marked(clock):
    stream = io.StringIO()
    with Progress(100, 10, 768, stream=stream, best=(10, 2.0)) as shown:
        shown.show_row({"step": 11, "loss": 1.0, "val_loss": 1.9}, best=(10, 2.0))  # of another kind of weights
        shown.show_row({"step": 12, "loss": 1.0, "val_loss": 2.5}, best=(12, 2.5))
        shown.show_row({"step": 13, "loss": 1.0}, best=(13, 1.0))
    assert [line.endswith(" best") for line in stream.getvalue().splitlines()[2:]] == [False, True, False]


def test_throughput_excludes_compilation_and_pauses():
    clock = Clock()
    meter = Throughput(tokens_per_step=100, first_step=5, elapsed_before=50.0, clock=clock)
    clock.now += 30
    assert meter.measure(10) is None  # the time includes the compilation
    clock.now += 4
    with meter.pause():
        clock.now += 1000
    assert meter.measure(20) == 100 * 10 / 4
    clock.now += 5
    assert meter.measure(30) == 100 * 10 / 5
    assert meter.measure(30) is None
    assert meter.elapsed() == 50 + 30 + 4 + 1000 + 5


def test_throughput_measures_from_begin():
    clock = Clock()
    meter = Throughput(tokens_per_step=100, first_step=0, clock=clock)
    with meter.pause():
        clock.now += 30
        meter.begin(1)
    clock.now += 3
    assert meter.measure(10) == 100 * 9 / 3


def test_no_progress_has_the_interface_of_progress(capsys):
    with NoProgress() as shown:
        shown.show_row({"step": 1})
        shown.advance(1)
        shown.show_evaluation("test", 1, 2)
        shown.show_message("nothing")
    assert capsys.readouterr().out == ""
    assert {name for name in vars(Progress) if not name.startswith("_")} <= set(dir(NoProgress))
