"""Trackers that are slow, fail or hang: each costs a run one line."""

import contextlib
import threading

import pytest

from shardformer.errors import RunError
from shardformer.logs.observers import Observers
from tests.waiting import PATIENCE


class Recorder:
    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, row):
        self.rows.append(row["step"])

    def close(self):
        self.closed = True


def raise_(error):
    raise error


def test_each_observer_receives_every_row_and_is_closed(said):
    recorders = [Recorder(), Recorder()]
    with Observers(finish_seconds=PATIENCE) as watching:
        for recorder in recorders:
            watching.start("a recorder", lambda recorder=recorder: recorder)
        for step in range(100):
            watching.write({"step": step})
    assert [recorder.rows for recorder in recorders] == [[*range(100)]] * 2
    assert all(recorder.closed for recorder in recorders)
    assert said == []


class Judge(Recorder):
    """An observer that distinguishes a failed run."""

    failed = False

    def close_failed(self):
        self.failed = True


@pytest.mark.parametrize("error", [RunError("no memory"), KeyboardInterrupt(), None])
def test_observer_that_asks_for_it_is_closed_as_failed(error, said):
    judge, recorder = Judge(), Recorder()
    with contextlib.suppress(RunError, KeyboardInterrupt), Observers(finish_seconds=PATIENCE) as watching:
        watching.start("a judge", lambda: judge)
        watching.start("a recorder", lambda: recorder)
        if error:
            raise error
    assert (judge.failed, judge.closed) == (error is not None, error is None)
    assert recorder.closed
    assert said == []


@pytest.mark.parametrize("error", [OSError("no route"), ValueError(), SystemExit(3), KeyboardInterrupt()])
def test_failing_observer_is_reported_once(error, said):
    class Broken(Recorder):
        def write(self, row):
            raise error

        def close(self):
            raise error

    recorder = Recorder()
    with Observers(finish_seconds=PATIENCE) as watching:
        watching.start("broken", Broken)
        watching.start("never there", lambda: raise_(error))
        watching.start("a recorder", lambda: recorder)
        for step in range(10):
            watching.write({"step": step})
    assert recorder.rows == [*range(10)]
    what = str(error) or type(error).__name__
    assert sorted(said) == [f"broken failed: {what}; training continues",
                            f"never there did not start: {what}; training continues"]  # fmt: skip


def test_hanging_observer_neither_slows_nor_blocks_the_run(said):
    forever = threading.Event()

    class Hanging(Recorder):
        def write(self, row):
            forever.wait(PATIENCE)

    try:
        with Observers(queue_rows=3, finish_seconds=0.05) as watching:
            watching.start("hanging", Hanging)
            for step in range(100):
                watching.write({"step": step})
    finally:
        forever.set()
    assert said == [
        "hanging is too slow: it does not receive every row; training continues",
        "hanging did not finish within 0.05 s: its last rows may be missing; training continues",
    ]


def test_finish_waits_once_for_a_full_queue(monkeypatch):
    """The wait for a place in the queue and the wait for the thread share the seconds."""
    writes, leave, joined = threading.Event(), threading.Event(), []

    class Slow(Recorder):
        def write(self, row):
            writes.set()
            leave.wait(PATIENCE)

    with Observers(queue_rows=1, finish_seconds=0.3) as watching:
        watching.start("slow", Slow)
        watching.write({"step": 1})
        writes.wait(PATIENCE)
        watching.write({"step": 2})
        monkeypatch.setattr(watching._workers[0]._thread, "join", joined.append)
    leave.set()
    assert len(joined) == 1
    assert joined[0] < 0.1


def test_observer_may_change_its_row():
    class Pops(Recorder):
        def write(self, row):
            self.rows.append(row.pop("step"))

    rows, recorders = [{"step": step} for step in range(50)], [Pops(), Pops()]
    with Observers(finish_seconds=PATIENCE) as watching:
        for recorder in recorders:
            watching.start("a recorder", lambda recorder=recorder: recorder)
        for row in rows:
            watching.write(row)
    assert [recorder.rows for recorder in recorders] == [[*range(50)]] * 2
    assert rows == [{"step": step} for step in range(50)]
