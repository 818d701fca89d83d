"""scripts/soak_test.py tells a process that grows from one that does not. Its full run takes minutes."""

import importlib.util
import os
import sys

import numpy as np
import pytest

from tests.launch import ROOT

STEPS = np.arange(0.0, 10_001, 40)


@pytest.fixture
def soak_test(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak_test", ROOT / "scripts" / "soak_test.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak_test", script)
    spec.loader.exec_module(script)
    return script


def readings(kb_a_step=0.0, noise=4.0, **last):
    """Returns readings of a process whose memory warms up for some thousand steps."""
    random = np.random.RandomState(0)
    resident = 1e6 - 1e4 * np.exp(-STEPS / 1000) + kb_a_step * STEPS + noise * random.normal(size=len(STEPS))
    resident[-20:] += last.get("jump", 0)
    descriptors, threads = np.full((2, len(STEPS)), 9.0)
    descriptors[-20:] += last.get("descriptors", 0)
    threads[-20:] += last.get("threads", 0)
    return np.stack([STEPS / 40, STEPS, resident, descriptors, threads], axis=1)


@pytest.mark.parametrize(
    ("process", "problem"),
    [({}, None), ({"noise": 500.0}, None), ({"jump": 250}, None), ({"kb_a_step": 1.0}, "memory grows by 1."),
     ({"kb_a_step": 0.1}, "memory grows by 0.1"), ({"descriptors": 1}, "descriptors grow to 10"),
     ({"threads": 2}, "threads grow to 11")],
    ids=str,
)  # fmt: skip
def test_growth_is_found(soak_test, process, problem):
    found = soak_test.find_growth(readings(**process))
    assert [line[: len(problem)] for line in found] == [problem] if problem else not found


@pytest.mark.parametrize(("wall", "problem"), [(100.9, []), (102.0, ["goodput.csv has 100.0 of 102.0 s"])])
def test_lost_time_is_found(soak_test, tmp_path, wall, problem):
    (tmp_path / "goodput.csv").write_text("step,time,start_s,step_s\n0,70,1,0\n9,1007,20,80\n")
    assert soak_test.find_lost_time(tmp_path, 1007 - wall) == problem


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_process_is_read(soak_test, tmp_path):
    before = soak_test.read(os.getpid())
    with (tmp_path / "file").open("w"):
        resident, descriptors, threads = soak_test.read(os.getpid())
    assert resident > 1000
    assert descriptors == before[1] + 1
    assert threads >= 1


@pytest.mark.parametrize(
    ("word", "message"), [("5", "expected key=value, got '5'"), ("times=300", "steps 10 times as many")]
)
def test_invalid_arguments_end_it_with_a_message(soak_test, capsys, word, message):
    assert soak_test.main([word, *(["steps=40"] if "=" in word else [])]) == 2
    assert message in capsys.readouterr().err
