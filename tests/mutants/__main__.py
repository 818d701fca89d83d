"""Applies each mutant to a copy of the package, runs the tests that reach it, and prints those that survive.

    python -m tests.mutants                   every mutant with the short tier's tests
    python -m tests.mutants 'router_*' dpo    some of them, by patterns of their names
    python -m tests.mutants --all-tests       with the slow tests of the same files too
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardformer.tables import format_count, format_table
from tests.mutants.table import ROOT, Mutant, find_tests, read_table

COPIED = ("shardformer", "tests", "scripts", ".github", ".ci", "pyproject.toml", "README.md")
SHORT = "not slow and not multiprocess and not legacy"  # without --short, which runs few cases of some tests
FAILED, INTERRUPTED = 1, 2  # exit statuses of pytest, for tests and for files that fail
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Outcome(NamedTuple):
    """What the tests said of a mutant."""

    mutant: Mutant
    killer: str  # the first test that failed; empty: none
    problem: str  # why a mutant without a killer survives
    seconds: float


class Copy:
    """A copy of the checkout, of which one file at a time has a mistake."""

    def __init__(self, folder: Path, limit: float, is_short: bool):
        self._folder, self._limit, self._is_short = folder, limit, is_short
        for name in COPIED:
            source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, folder / name)

    def try_out(self, mutant: Mutant) -> Outcome:
        """Returns what the tests say of the package with this mistake."""
        tests, path = find_tests(mutant), self._folder / mutant.path
        source = path.read_text()
        self._write(path, mutant.change(source))
        start = time.monotonic()
        try:
            failed, problem = self.run(tests, stop=True) if tests else ([], "no test file reaches it")
        finally:
            self._write(path, source)
        return Outcome(mutant, failed[0] if failed else "", problem, time.monotonic() - start)

    def run(self, tests: Iterable[str], stop: bool) -> tuple[list[str], str]:
        """Returns the tests that failed, and why there are none; `stop` ends at the first one."""
        marks = ["-m", SHORT] if self._is_short else []
        words = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *marks, *tests]
        try:
            done = subprocess.run(
                [*words, "-x"] if stop else words, cwd=self._folder, env=os.environ | {"JAX_PLATFORMS": "cpu"},
                capture_output=True, text=True, timeout=self._limit if stop else None, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [], f"no failure within {self._limit:.0f} s"
        found = FAILURE.findall(done.stdout)
        if done.returncode in (FAILED, INTERRUPTED) and found:
            return found, ""
        return [], "" if done.returncode == 0 else f"pytest ended with status {done.returncode}: {done.stdout[-300:]}"

    @staticmethod
    def _write(path: Path, source: str) -> None:
        """Writes a source file, and removes its bytecode: two writes in a second would have equal bytecode."""
        path.write_text(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


def select(mutants: list[Mutant], patterns: list[str]) -> list[Mutant]:
    """Returns the mutants of which a name matches a pattern; all without patterns."""
    chosen = [mutant for mutant in mutants if any(fnmatch.fnmatchcase(mutant.name, p) for p in patterns or ["*"])]
    if not chosen:
        raise SystemExit(f"no mutant is named {' or '.join(patterns)}; the names are in tests/mutants/*.toml")
    return chosen


def main(words: list[str] | None = None) -> int:
    """Tries mutants; returns 1 if one survives that the table does not call equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of mutants, or patterns such as 'dpo_*'")
    parser.add_argument("--all-tests", action="store_true", help="run slow tests too")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one mutant's tests")
    options = parser.parse_args(words)
    chosen = select(read_table(), options.names)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), options.limit, is_short=not options.all_tests)
        outcomes = []
        for number, mutant in enumerate(chosen, 1):
            outcome = copy.try_out(mutant)
            verdict = f"killed by {outcome.killer}" if outcome.killer else f"SURVIVED {outcome.problem}"
            print(f"{number}/{len(chosen)} {mutant.name}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
        killers = sorted({outcome.killer for outcome in outcomes if outcome.killer})
        broken = copy.run(killers, stop=False)[0] if killers else []
    return report(outcomes, set(broken))


def report(outcomes: list[Outcome], broken: set[str]) -> int:
    """Prints the survivors; `broken` are the tests that fail without a mutant, and therefore kill none."""
    survivors = [outcome for outcome in outcomes if not outcome.killer or outcome.killer in broken]
    unknown = [outcome for outcome in survivors if not outcome.mutant.equivalent]
    if survivors:
        rows = [[each.mutant.name, _describe(each), each.mutant.cost] for each in survivors]
        print(format_table(rows, ["survivor", "why", "cost"]))
    print(
        f"{format_count(len(outcomes), 'mutant')}: {len(outcomes) - len(survivors)} killed, "
        f"{len(survivors) - len(unknown)} equivalent, {len(unknown)} survived"
    )
    return 1 if unknown else 0


def _describe(outcome: Outcome) -> str:
    if outcome.mutant.equivalent:
        return f"equivalent: {outcome.mutant.equivalent}"
    return f"{outcome.killer} fails without it too" if outcome.killer else outcome.problem or "no test fails"


if __name__ == "__main__":
    sys.exit(main())
