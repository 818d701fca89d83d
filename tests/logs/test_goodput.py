"""The seconds of a run by kind add up to its wall time, over restarts too."""

import csv
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import jax
import pytest

from shardformer.logs import command_start
from shardformer.logs.goodput import CATEGORIES, CLOCK, COMPILING, Goodput, read_clock
from tests import runs


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def rows(folder) -> list[dict[str, float]]:
    with open(folder / "goodput.csv", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_every_second_is_charged_to_one_kind():
    clock = Clock()
    goodput = Goodput(clock)
    clock.now += 5
    goodput.begin_steps()
    clock.now += 10
    with goodput.spending("evaluation"):
        clock.now += 2
        with goodput.spending("save"):
            clock.now += 1
        clock.now += 2
    clock.now += 20
    assert goodput.describe() == "goodput 75.0% of 40.0 s: start 5.0, step 30.0, evaluation 4.0, save 1.0"
    assert goodput.take("save") == 1
    assert goodput.take("save") == 0


def test_clock_of_the_system_may_jump(monkeypatch):
    goodput = Goodput()
    monkeypatch.setattr(time, "time", lambda: -1e9)
    with goodput.spending("step"):
        pass
    assert all(0 <= seconds < 60 for seconds in goodput.seconds.values())


def test_clock_counts_from_1970():
    """A resumed run compares it with that of the start before, which another machine may have had."""
    assert read_clock() == pytest.approx(time.time(), abs=60)


def test_compilation_is_moved_out_of_the_kind_around_it():
    clock = Clock()
    goodput = Goodput(clock)
    with goodput.noting_compilation():
        clock.now += 8
        jax.monitoring.record_event_duration_secs(COMPILING[0], 3)
        jax.monitoring.record_event_duration_secs("/jax/another", 3)
    jax.monitoring.record_event_duration_secs(COMPILING[0], 3)  # after the run
    goodput.begin_steps()
    assert (goodput.seconds["start"], goodput.seconds["compile"]) == (5, 3)


def test_compilation_in_another_thread_is_not_moved():
    clock = Clock()
    goodput = Goodput(clock)
    with goodput.noting_compilation():
        thread = threading.Thread(target=jax.monitoring.record_event_duration_secs, args=(COMPILING[0], 3))
        thread.start()
        thread.join()
        clock.now += 8
    goodput.begin_steps()
    assert (goodput.seconds["start"], goodput.seconds["compile"]) == (8, 0)


def test_repeated_steps_are_lost_and_the_gap_is_waiting(tmp_path):
    clock = Clock()
    first = Goodput(clock)
    first.continue_file(tmp_path, 0)
    first.begin_steps()
    for step in (1, 2, 3):  # a checkpoint at step 2, and a kill after step 3
        clock.now += 10
        first.write(step)
    clock.now += 50
    second = Goodput(clock)
    clock.now += 4
    second.continue_file(tmp_path, 2)
    second.begin_steps()
    clock.now += 10
    second.write(3)
    last = rows(tmp_path)[-1]
    assert {kind: last[f"{kind}_s"] for kind in CATEGORIES if last[f"{kind}_s"]} == {
        "start": 4,
        "step": 30,
        "lost": 10,
        "waiting": 50,
    }
    assert last["time"] - 100 == sum(last[f"{kind}_s"] for kind in CATEGORIES)


def test_last_row_has_the_time_after_the_last_step(tmp_path):
    clock = Clock()
    goodput = Goodput(clock)
    goodput.continue_file(tmp_path, 0)
    goodput.begin_steps()
    clock.now += 10
    goodput.write(7)
    with goodput.spending("evaluation"):
        clock.now += 5
    assert goodput.finish() == "goodput 66.7% of 15.0 s: step 10.0, evaluation 5.0"
    assert [(row["step"], row["evaluation_s"]) for row in rows(tmp_path)] == [(0, 0), (7, 0), (7, 5)]


def test_missing_folder_does_not_fail_a_finished_run(tmp_path):
    goodput = Goodput(Clock())
    (tmp_path / "run").mkdir()
    goodput.continue_file(tmp_path / "run", 0)
    shutil.rmtree(tmp_path / "run")
    assert goodput.finish().startswith("goodput ")


def test_start_includes_the_imports_of_the_command():
    clock = Clock()
    command_start.note_start(age=3.0, clock=clock)
    clock.now += 8
    goodput = Goodput(clock)
    goodput.restart(command_start.take_start())
    clock.now += 2
    goodput.begin_steps()
    assert goodput.seconds["start"] == 13
    assert command_start.take_start() is None  # a second run in this process measures from a new start


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
def test_age_of_a_process_counts_its_interpreter():
    program = "import time; time.sleep(0.5); from shardformer.logs.command_start import measure_age as m; print(m())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age <= time.monotonic() - began + 0.02  # /proc counts hundredths


@pytest.mark.parametrize(("ago", "age"), [(2, 2), (1000, 30), (-5, 0), ("never", 30)])
def test_installation_before_the_command_does_not_count(tmp_path, monkeypatch, ago, age):
    """A script installed for 28 seconds, and was then replaced by the trainer."""
    began, now = time.monotonic(), time.time()
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"1 (python) {' '.join(['0'] * 19)} {int((time.clock_gettime(time.CLOCK_BOOTTIME) - 30) * ticks)} 0"
    (tmp_path / "stat").write_text(stat)
    monkeypatch.setenv("SHARDFORMER_STARTED", ago if ago == "never" else str(now - ago))
    measured = command_start.measure_age(tmp_path / "stat")
    assert age - 0.5 <= measured <= age + 0.5 + time.monotonic() - began


def test_damaged_record_begins_again(tmp_path):
    (tmp_path / "goodput.csv").write_text("step,time,colour\n1,2,red\n")
    goodput = Goodput(Clock())
    goodput.continue_file(tmp_path, 3)
    assert [row["step"] for row in rows(tmp_path)] == [3]


@pytest.mark.slow
def test_goodput_of_a_resumed_run_adds_up_to_the_wall_time(tmp_path, capsys, monkeypatch):
    marks = []  # before and after the first restart, ..., and before and after the last finish
    for name in ("restart", "finish"):
        note_times(monkeypatch, CLOCK, name, marks)
    assert not runs.train("tiny", "mesh=4x2", "steps=20", "log_every=1", f"data={runs.text(tmp_path)}",
                          f"out={tmp_path}/run", stop_after=10)  # fmt: skip
    time.sleep(2)
    assert not runs.train("--resume", f"{tmp_path}/run")
    last = rows(tmp_path / "run")[-1]
    assert {kind for kind in CATEGORIES if last[f"{kind}_s"] > 0.01} >= {"start", "step", "evaluation", "waiting"}
    lines = re.findall(r"goodput [\d.]+% of ([\d.]+) s: start .*", capsys.readouterr().out)
    assert len(lines) == 2
    shortest, longest = 0.99 * (marks[-2] - marks[1]), 1.01 * (marks[-1] - marks[0])
    assert shortest - 0.05 <= float(lines[1]) <= longest + 0.05  # it has one decimal
    assert shortest <= sum(last[f"{kind}_s"] for kind in CATEGORIES) <= longest


def note_times(monkeypatch, owner, name, times) -> None:
    """Appends the time before and after each call of a function."""
    function = getattr(owner, name)

    def call(*arguments):
        times.append(time.time())
        result = function(*arguments)
        times.append(time.time())
        return result

    monkeypatch.setattr(owner, name, call)
