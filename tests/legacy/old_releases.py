"""A plugin of pytest that runs the tests of an old release, unedited, under `shardformer.legacy`.

OUTCOMES=outcomes.jsonl python -m pytest -p tests.legacy.old_releases -p no:cacheprovider -o addopts= \
    --import-mode=importlib FILES

Each test adds a line to $OUTCOMES. If the process dies, the same command goes on behind the test that it died in.
Tests of jax 0.4.13 need `-p tests.legacy.old_jax_names` too. The files are not kept here: they come from the tag
jax-v0.4.13, and from the wheels of dm-haiku 0.0.9 and optax 0.1.5, which PYTHONPATH names; those run without
`--import-mode`, in the folder of the wheel. CASES=2 keeps the first two cases of each parametrized test.
"""

import collections
import json
import os
import re
import signal
from pathlib import Path

import pytest

from shardformer import legacy

legacy.install()  # before pytest imports the files

RUNNING = "running"
SECONDS = 120  # for one test


def recorded(path: Path) -> dict[str, str]:
    """Returns the last outcome of each test of a file of outcomes."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line)[:2] for line in lines)


def _record(item: pytest.Item, outcome: str, why: str = "") -> None:
    with Path(os.environ["OUTCOMES"]).open("a") as file:
        file.write(json.dumps([test_name(item.nodeid), outcome, why]) + "\n")


def test_name(node: str) -> str:
    """Returns the name of a test without its folder: `pmap_test.py::ArrayTest::test_repr`."""
    path, _, test = node.partition("::")
    return f"{Path(path).name}::{test}"


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items):
    known = recorded(Path(os.environ["OUTCOMES"]))
    for item in items:
        if known.get(test_name(item.nodeid)) == RUNNING:
            _record(item, "aborted")
    items[:] = [item for item in _first_cases(items) if test_name(item.nodeid) not in known]


def _first_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the first $CASES cases of each method; their names differ from the first digit or bracket on."""
    number = int(os.environ.get("CASES", len(items)))
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    kept = []
    for item in items:
        home, _, case = item.nodeid.rpartition("::")
        method = home, re.split(r"[0-9[]", case, maxsplit=1)[0]
        seen[method] += 1
        if seen[method] <= number:
            kept.append(item)
    return kept


def _stop(*_):
    raise TimeoutError(f"the test took longer than {SECONDS} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    _record(item, RUNNING)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        _record(item, report.outcome, call.excinfo.exconly() if call.excinfo else "")
