"""Effects of a signal: its line, the answer to the loop, and the handlers."""

import codecs
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardformer.logs.progress import Progress
from shardformer.training import stop_signal
from shardformer.training.stop_signal import StopSignal
from tests import runs
from tests.surroundings import before_call, note_exits
from tests.waiting import PATIENCE, wait_for

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@pytest.fixture
def patient(monkeypatch):
    """Lets a stop wait for its line even if the line's thread is stopped for a while."""
    monkeypatch.setattr(stop_signal, "ANNOUNCE_SECONDS", PATIENCE)


def test_line_about_a_signal_comes_before_those_of_its_stop(monkeypatch, capfd, patient):
    before_call(monkeypatch, StopSignal, "_announce", lambda stop: time.sleep(0.2))
    with StopSignal() as stop:
        runs.terminate()
        assert stop.is_requested()
        print("stopped", flush=True)
    assert capfd.readouterr().out == "\nSIGTERM: stopping; Ctrl-C now ends at once\nstopped\n"


def test_blocked_output_does_not_hold_up_a_stop(monkeypatch):
    monkeypatch.setattr(stop_signal, "ANNOUNCE_SECONDS", 0.01)
    released, shown = threading.Event(), []

    def show(line: str) -> None:
        released.wait(PATIENCE)
        shown.append(line)

    with StopSignal() as stop, stop.printed_by(show, plan="stopping"):
        runs.terminate()
        assert stop.is_requested()
        assert not shown
        released.set()


def test_signal_before_the_processes_join_is_kept(monkeypatch):
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        heard, checks = [], []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))  # as JAX replaces the handler
        # The listening thread, which may come late, received the signal before the processes joined.
        main = threading.main_thread()
        monkeypatch.setattr(stop_signal.jax.distributed, "is_initialized", lambda: threading.current_thread() is main)

        def is_reached(check):
            checks.append(check)
            return len(checks) == 2

        monkeypatch.setattr(stop_signal.multihost_utils, "reached_preemption_sync_point", is_reached)
        assert [stop.is_requested() for _ in range(4)] == [False, True, True, True]
        assert checks == [1, 2]
        assert heard == [1]


def test_second_ctrl_c_ends_the_process(monkeypatch, capfd):
    ended = []
    note_exits(monkeypatch, ended.append)
    with StopSignal() as stop:
        assert not stop.is_requested()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_requested()
        assert stop.name == "SIGINT"
        printed = []
        wait_for(lambda: printed.append(capfd.readouterr().out) or "SIGINT: stopping" in "".join(printed))
        assert not ended
        signal.raise_signal(signal.SIGINT)
        wait_for(lambda: ended == [1])
        assert "what came after the last checkpoint is lost" in capfd.readouterr().err


def test_handlers_and_threads_end_with_the_block():
    before = [signal.getsignal(number) for number in STOPPING]
    threads = set(threading.enumerate())
    with StopSignal():
        assert [signal.getsignal(number) for number in STOPPING] != before
    assert [signal.getsignal(number) for number in STOPPING] == before
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile
    assert signal.set_wakeup_fd(-1) == -1


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("output", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY), None])
def test_signal_stops_whatever_standard_output_is(number, output):
    kept = os.dup(1)
    try:
        with StopSignal() as stop:
            os.dup2(output(), 1) if output else os.close(1)
            signal.raise_signal(number)
            assert stop.is_requested()
            assert stop.name == number.name
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_output_that_blocks_does_not_delay_the_second_ctrl_c(monkeypatch):
    ended, released = [], threading.Event()
    note_exits(monkeypatch, ended.append)
    with StopSignal() as stop, stop.printed_by(lambda line: released.wait(PATIENCE), plan=""):
        signal.raise_signal(signal.SIGINT)
        wait_for(stop.is_requested)
        signal.raise_signal(signal.SIGINT)
        wait_for(lambda: ended == [1])
        released.set()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_ignored_signal_stays_ignored(number):
    """The signal of nohup, and one that a scheduler's script ignores."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(number)
            assert not stop.is_requested()
    finally:
        signal.signal(number, before)


def draw_screen(written: str) -> list[str]:
    """Returns the lines that a terminal shows after it has drawn this."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif up := re.fullmatch(r"\x1b\[(\d*)A", piece):
            row = max(row - int(up[1] or 1), 0)
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif not piece.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in rows]


def test_line_stays_above_the_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = os.openpty()
    written: list[str] = []
    with ThreadPoolExecutor(1) as reader, open(theirs, "w") as stream, StopSignal() as stop:
        # All the time: a display that nobody reads blocks.
        read = reader.submit(read_terminal, ours, written, until="\x1b[?25h")
        with Progress(steps=10, first_step=0, tokens_per_step=1, stream=stream) as shown:
            shown.advance(1)
            with stop.printed_by(shown.show_message, plan="finishing the step in flight, then saving"):
                signal.raise_signal(signal.SIGTERM)
                wait_for(lambda: "at once" in "".join(written))
            for number in range(2, 5):
                shown.advance(number)
                time.sleep(0.3)  # the display is redrawn
        read.result(PATIENCE)
    os.close(ours)
    lines = draw_screen("".join(written))
    assert "SIGTERM: finishing the step in flight, then saving; Ctrl-C now ends at once" in lines
    assert any("step 4/10" in line for line in lines)


def read_terminal(descriptor: int, written: list[str], until: str) -> None:
    """Appends what a program writes to a terminal, as it comes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while until not in "".join(written):
        written.append(decoder.decode(os.read(descriptor, 65536)))
