"""A copy of the checkout in which one file at a time has a mistake, and pytest in it.

Each run of pytest is a fork of this process, which has imported JAX and its libraries already: with 5 s for a mutant,
these imports would double the time. The package and its tests are imported anew by each.
"""

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutants.table import ROOT, Mutant, find_tests

COPIED = (
    "shardformer", "tests", "scripts", ".github", ".ci", "pyproject.toml", "setup.py", "README.md",
    "checkpoints/README.md", "data/README.md",
)  # fmt: skip
OWN = ("shardformer", "tests")  # packages that each run imports anew
LIBRARIES = ("pytest", "numpy", "scipy.special", "jax", "jax.numpy", "jax.experimental.pallas", "haiku", "optax")
SHORT = "not slow and not multiprocess and not legacy"  # without --short, which runs few cases of some tests
PASSED = "no test fails"
FAILED, INTERRUPTED = 1, 2  # exit statuses of pytest, for tests and for files that fail


class Outcome(NamedTuple):
    """What the tests said of a mutant."""

    mutant: Mutant
    killer: str  # the first test that failed; empty: none
    problem: str  # why there is none
    seconds: float


class Failures:
    """A plugin of pytest that writes the names of failed tests, and of files that cannot be imported, to a file."""

    def __init__(self, path: Path):
        self._path = path

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    pytest_collectreport = pytest_runtest_logreport


class Checkout:
    """The copy; `limit` are the seconds of one mutant's tests, `is_short` leaves out slow ones."""

    def __init__(self, folder: Path, limit: float, is_short: bool):
        self._folder, self._limit, self._is_short = folder, limit, is_short
        os.environ["JAX_PLATFORMS"] = "cpu"
        for name in LIBRARIES:
            importlib.import_module(name)
        for name in COPIED:
            source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            elif source.exists():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy2(source, folder / name)

    def try_out(self, mutant: Mutant) -> Outcome:
        """Returns what the tests say of the package with this mistake."""
        tests, path = find_tests(mutant), self._folder / mutant.path
        source = path.read_text()
        _write(path, mutant.change(source))
        start = time.monotonic()
        try:
            failed, problem = self._run(["-x", *tests], self._limit) if tests else ([], "no test file reaches it")
        finally:
            _write(path, source)
        return Outcome(mutant, failed[0] if failed else "", problem, time.monotonic() - start)

    def find_failing(self, tests: list[str]) -> set[str]:
        """Returns those of the tests that fail without a mistake."""
        if not tests:
            return set()
        failed, problem = self._run(tests, len(tests) * self._limit)
        if not failed and problem != PASSED:
            raise RuntimeError(f"the tests cannot be run without a mistake: {problem}")
        return set(failed)

    def _run(self, words: Iterable[str], limit: float) -> tuple[list[str], str]:
        """Runs pytest; returns the tests that failed, and why there are none."""
        output, failures = self._folder / "pytest.txt", self._folder / "failures.txt"
        failures.write_text("")
        marks = ["-m", SHORT] if self._is_short else []
        sys.stdout.flush()
        child = os.fork()
        if not child:
            self._be_pytest(["-q", "-p", "no:cacheprovider", *marks, *words], output, Failures(failures))
        status = _wait(child, limit)
        if status is None:
            return [], f"no failure within {limit:.0f} s"
        found = failures.read_text().splitlines()
        if status in (FAILED, INTERRUPTED) and found:
            return found, ""
        said = output.read_text(errors="replace")[-300:]
        return [], PASSED if status == 0 else f"pytest ended with status {status}: {said}"

    def _be_pytest(self, words: list[str], output: Path, failures: Failures) -> None:
        """Turns this process, a fork, into pytest in the copy; it does not return."""
        status = -1
        try:
            os.setpgid(0, 0)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(self._folder)
            sys.path.insert(0, str(self._folder))
            for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
                del sys.modules[name]
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # pytest's own capture may hold the old one
            status = int(importlib.import_module("pytest").main(words, [failures]))
            sys.stdout.flush()
        finally:
            os._exit(status)


def _wait(child: int, limit: float) -> int | None:
    """Returns the exit status of a process; None if it was stopped at the limit."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _write(path: Path, source: str) -> None:
    """Writes a source file, and removes its bytecode: Python would take that of an equally long source of a second."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
