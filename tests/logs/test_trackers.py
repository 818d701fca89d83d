"""Trackers by name, and traces of steps."""

import pytest

from shardformer.errors import UsageError
from shardformer.logs import observers, step_profiler
from shardformer.logs.step_profiler import StepProfiler
from tests.surroundings import let_fail


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such_module:f", "tracker=no_such_module:f cannot be imported: No module named 'no_such_module'"),
        ("..relative:f", "tracker=..relative:f cannot be imported: "),
        ("this.is.no.module:f", "cannot be imported: "),
        ("json:no_such_function", "cannot be imported: module 'json' has no attribute 'no_such_function'"),
        ("json:__name__", "tracker=json:__name__ is a str; name a function or a class"),
    ],
)
def test_wrong_tracker_is_rejected(place, message):
    with pytest.raises(UsageError, match=message):
        observers.import_tracker(place)


def test_tracker_that_calls_exit_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "ending_tracker.py").write_text("import sys; sys.exit()")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"tracker=ending_tracker:f cannot be imported: its module calls sys\.exit"):
        observers.import_tracker("ending_tracker:f")


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.setattr(step_profiler.jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(step_profiler.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def trace(steps, first, last, calls, folder):
    """Runs a loop that dispatches each step before it reads the previous one."""
    with StepProfiler(steps, folder) as profiler:
        for step in range(first, last + 1):
            profiler.begin(step)
            calls.append(step)
            if step > first:
                profiler.end(step - 1)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, [3, 4, 5, 6]),
        ((4, 4), [3, "start", 4, 5, "stop", 6]),
        ((1, 3), ["start", 3, 4, "stop", 5, 6]),  # resumed within the range
        ((5, 90), [3, 4, "start", 5, 6, "stop"]),  # ends within it
        ((1, 2), [3, 4, 5, 6]),
    ],
)
def test_profiler_traces_the_given_steps(tmp_path, calls, steps, expected, said):
    trace(steps, 3, 6, calls, tmp_path)
    assert calls == expected
    assert len(said) == ("stop" in expected)


def test_failing_profiler_is_reported_once(tmp_path, calls, monkeypatch, said):
    error = RuntimeError("Only one profile may be run at a time.")
    let_fail(monkeypatch, step_profiler.jax.profiler, "start_trace", error)
    trace((3, 5), 3, 6, calls, tmp_path)
    assert said == ["the profile failed: Only one profile may be run at a time.; training continues"]
