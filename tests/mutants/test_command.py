"""The command tells a mutant that tests notice from one that survives."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.table import ROOT

pytestmark = pytest.mark.multiprocess

SOURCE = "def add(a, b):\n    return a + b  # once\n"
TEST = "from shardformer.sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n"
ROW = """[{name}]
file = "sums.py"
before = "a + b"
after = "{after}"
cost = "wrong sums"
tests = ["test_sums.py"]
{more}
"""


def run_command(folder: Path, test: str, **rows: str) -> tuple[int, str]:
    """Runs the command in a checkout of one function and its test; a row is `after`, or `after; equivalent = ...`."""
    table = "".join(
        ROW.format(name=name, after=row.partition(";")[0], more=row.partition(";")[2]) for name, row in rows.items()
    )
    files = {"shardformer/sums.py": SOURCE, "tests/test_sums.py": test, "tests/mutants/sums.toml": table}
    files |= {f"{name}/__init__.py": "" for name in ("shardformer", "tests", "tests/mutants")}
    copied = ["shardformer/tables.py", *(f"tests/mutants/{name}.py" for name in ("__main__", "checkout", "table"))]
    for name, text in (files | {name: (ROOT / name).read_text() for name in copied}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (folder / "shardformer/sums.py").read_text() == SOURCE
    return done.returncode, done.stdout + done.stderr


def test_survivor_is_printed_and_fails_the_command(tmp_path):
    rows = {"minus": "a - b", "times": "a * b", "swapped": "b + a;equivalent = 'sums commute'"}
    status, said = run_command(tmp_path, TEST, **rows)
    assert "1/3 minus: killed by tests/test_sums.py::test_add" in said
    assert "2/3 times: SURVIVED: no test fails" in said
    assert "3 mutants: 1 killed, 1 equivalent, 1 survived" in said
    assert status == 1


def test_equivalent_mutants_pass(tmp_path):
    status, said = run_command(tmp_path, TEST, minus="a - b", swapped="b + a;equivalent = 'sums commute'")
    assert (status, "2 mutants: 1 killed, 1 equivalent, 0 survived" in said) == (0, True)


def test_test_that_always_fails_kills_nothing(tmp_path):
    status, said = run_command(tmp_path, "def test_add():\n    assert False\n", minus="a - b")
    assert "tests/test_sums.py::test_add fails without it too" in said
    assert status == 1
