"""Trackers by name, and traces of steps."""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import math
import sys

import pytest

from shardformer.config.run_keys import TRACKERS
from shardformer.errors import RunError, UsageError
from shardformer.logs import step_profiler, trackers
from shardformer.logs.observers import Observers
from shardformer.logs.step_profiler import StepProfiler
from tests.logs import tracker_packages
from tests.surroundings import let_fail

SETTINGS = {"out": "checkpoints/mine", "steps": 4, "lr": 0.1, "task": print}
ROWS = ({"step": 1, "loss": 2.0, "val_loss": None, "own": 3.0}, {"step": 2, "loss": 1.0, "val_loss": 1.5, "own": 3.5})
VALUES = ({"train/loss": 2.0, "own": 3.0}, {"train/loss": 1.0, "validation/loss": 1.5, "own": 3.5})


ENDS = {
    "wandb": lambda failed: ("Run.finish", {"exit_code": int(failed)}),
    "mlflow": lambda failed: ("end_run", {"status": "FAILED" if failed else "FINISHED"}),
    "aim": lambda failed: ("config", {"status": "failed" if failed else "finished"}),
}


def report(tracker, folder, new=True, rows=ROWS, error=None):
    with contextlib.suppress(RunError), Observers() as observers:
        trackers.start_tracker(observers, tracker, folder, SETTINGS, new)
        for row in rows:
            observers.write(row)
        if error:
            raise error


@pytest.fixture(params=[*trackers.CLIENTS])
def calls(request, monkeypatch):
    """The calls of a tracker's package, whose stand-in rejects arguments that the package does not know."""
    noted: list = []
    monkeypatch.setitem(sys.modules, request.param, tracker_packages.StandIn(request.param, noted))
    return request.param, noted


def find_values(calls):
    """Returns the logged values by step, of any package."""
    found: dict = {}
    for name, given in calls:
        if name in ("Run.log", "log_metrics", "Run.track"):
            values = given.get("data") or given.get("metrics") or {given.get("name"): given.get("value")}
            found.setdefault(given["step"], {}).update(values)
    return found


def test_package_receives_rows_settings_and_the_end(tmp_path, calls, said):
    tracker, noted = calls
    report(tracker, tmp_path)
    assert said == []
    assert find_values(noted) == {1: VALUES[0], 2: VALUES[1]}
    config = {"out": "checkpoints/mine", "steps": 4, "lr": 0.1, "task": str(print)}
    assert config in [value for _, given in noted for value in given.values()]
    assert noted[-1][0] in ("Run.finish", "end_run", "Run.close")


@pytest.mark.parametrize("error", [None, RunError("a loss that is not finite")])
def test_package_shows_only_a_failed_run_as_failed(tmp_path, calls, error, said):
    tracker, noted = calls
    report(tracker, tmp_path, error=error)
    ends = ENDS[tracker]
    assert noted.count(ends(failed=error is not None)) == 1
    assert noted.count(ends(failed=error is None)) == 0
    assert said == []


def test_resume_continues_the_run_of_the_package(tmp_path, calls, said):
    tracker, noted = calls
    (tmp_path / trackers.FILE).write_text(json.dumps({tracker: "of_before", "other": "its_own"}))
    report(tracker, tmp_path, new=False)
    started = next(given for name, given in noted if name in ("init", "start_run", "Run.__init__"))
    assert "of_before" in started.values()
    assert json.loads((tmp_path / trackers.FILE).read_text()) == {tracker: "of_before", "other": "its_own"}
    assert said == []


def test_wandb_leaves_the_terminal_alone(tmp_path, monkeypatch, said):
    noted: list = []
    monkeypatch.setitem(sys.modules, "wandb", tracker_packages.StandIn("wandb", noted))
    report("wandb", tmp_path)
    assert dict(noted)["init"]["settings"] == {"console": "off"}
    assert said == []


@pytest.mark.parametrize("stored", ['{"%s": "../elsewhere"}', '{"%s": 7}', "[]", '{"%s', None])
def test_new_run_or_invalid_identity_starts_a_new_one(tmp_path, calls, stored):
    tracker, _ = calls
    (tmp_path / trackers.FILE).write_text(stored.replace("%s", tracker) if stored else f'{{"{tracker}": "of_before"}}')
    report(tracker, tmp_path, new=stored is None)
    assert json.loads((tmp_path / trackers.FILE).read_text()) == {tracker: "run_1"}


def test_wrong_argument_is_noticed_by_the_stand_in():
    package = tracker_packages.StandIn("wandb", [])
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        package.init(project="mine").log({}, steps=1)
    with pytest.raises(AttributeError, match=r"no recorded Run\.write"):
        package.init().write({})


def skip_unless_installed(package: str) -> None:
    """Looks for the package's files: a stand-in of `legacy` could be imported too."""
    if package not in importlib.metadata.packages_distributions():
        pytest.skip(f"did not run: {package} is not installed")


@pytest.mark.parametrize("tracker", trackers.CLIENTS)
def test_installed_package_has_the_recorded_signatures(tracker):
    skip_unless_installed(tracker)
    recorded = json.loads(tracker_packages.RECORD.read_text())[tracker]
    assert recorded["functions"] == tracker_packages.record(tracker)["functions"]


@pytest.mark.slow
@pytest.mark.parametrize("tracker", trackers.CLIENTS)
def test_installed_package_stores_a_run(tmp_path, monkeypatch, tracker, said):
    """Offline, in the current folder: two starts report to one run."""
    skip_unless_installed(tracker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.check_tracker(tracker)
    report(tracker, tmp_path)
    first = trackers.read_identities(tmp_path)
    report(tracker, tmp_path, new=False, rows=[{"step": 3, "loss": math.nan}])
    assert said == []
    assert first.keys() == {tracker}
    assert trackers.read_identities(tmp_path) == first


def test_every_tracker_is_by_a_package_or_always_written():
    assert {*TRACKERS} == {*trackers.CLIENTS, "tensorboard"}


def test_tensorboard_needs_no_package_and_no_observer(tmp_path):
    trackers.check_tracker("tensorboard")
    report("tensorboard", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tracker", trackers.CLIENTS)
def test_missing_package_is_named(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, tracker, raising=False)
    (tmp_path / tracker).mkdir()  # such as wandb's own folder of runs
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=f"tracker={tracker} needs its package, .* pip install {tracker}"):
        trackers.check_tracker(tracker)


def test_missing_login_is_reported_before_the_run(monkeypatch):
    package = tracker_packages.StandIn("wandb", [])
    package.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a file")
    monkeypatch.setitem(sys.modules, "wandb", package)
    trackers.check_tracker("wandb")
    assert [name for name, _ in package._calls] == ["login"]
    monkeypatch.setattr(package, "login", lambda **_: 1 / 0, raising=False)
    with pytest.raises(UsageError, match="tracker=wandb: division by zero; without an account: WANDB_MODE=offline"):
        trackers.check_tracker("wandb")


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
        trackers.import_tracker(place)


def test_tracker_that_calls_exit_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "ending_tracker.py").write_text("import sys; sys.exit()")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"tracker=ending_tracker:f cannot be imported: its module calls sys\.exit"):
        trackers.import_tracker("ending_tracker:f")


@pytest.fixture
def traces(monkeypatch):
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
def test_profiler_traces_the_given_steps(tmp_path, traces, steps, expected, said):
    trace(steps, 3, 6, traces, tmp_path)
    assert traces == expected
    assert len(said) == ("stop" in expected)


def test_failing_profiler_is_reported_once(tmp_path, traces, monkeypatch, said):
    error = RuntimeError("Only one profile may be run at a time.")
    let_fail(monkeypatch, step_profiler.jax.profiler, "start_trace", error)
    trace((3, 5), 3, 6, traces, tmp_path)
    assert said == ["the profile failed: Only one profile may be run at a time.; training continues"]
