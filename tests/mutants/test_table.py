"""The table of mutants is up to date, and its command tells a noticed mutant from one that survives."""

import ast
import collections

import pytest

from tests.mutants import __main__ as command
from tests.mutants.table import ROOT, Mutant, find_tests, read_table

MUTANTS = read_table()


def test_every_row_changes_the_code():
    """A row whose text has changed raises; each mistake must be Python and change what is computed."""
    for mutant in MUTANTS:
        source = (ROOT / mutant.path).read_text()
        assert mutant.before.count("\n") == 0, mutant.name
        changed = ast.parse(mutant.change(source))
        assert ast.dump(changed) != ast.dump(ast.parse(source)), mutant.name


def test_every_row_has_a_cost_and_tests():
    for mutant in MUTANTS:
        assert mutant.cost, mutant.name
        tests = find_tests(mutant)
        assert tests, f"{mutant.name}: name its tests"
        assert all((ROOT / name.partition("::")[0]).is_file() for name in tests), mutant.name


def test_every_mistake_is_in_the_table_once():
    assert len(MUTANTS) >= 90
    places = collections.Counter((each.file, each.before, each.after, each.occurrence) for each in MUTANTS)
    assert max(places.values()) == 1


def test_text_that_occurs_otherwise_is_rejected():
    row = Mutant("half", "files.py", "x", "y", "none")
    with pytest.raises(ValueError, match=r"mutant half: shardformer/files.py has 'x' 2 times, expected 1; rewrite"):
        row.change("x + x")
    assert Mutant("half", "files.py", "x", "y", "none", occurrence=2, times=3).change("x + x + x") == "x + y + x"


def test_tests_of_a_row_are_those_that_mirror_its_module():
    found = find_tests(Mutant("any", "optim/schedule.py", "", "", ""))
    assert found[0] == "tests/optim/test_schedule.py"
    assert all(name.startswith("tests/optim/") for name in found)


def make_checkout(tmp_path, monkeypatch, *mutants):
    """Writes a package of one function and its test, as the checkout of which the command makes copies."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "read_table", lambda: list(mutants))
    for name, text in {
        "shardformer/__init__.py": "", "shardformer/sums.py": "def add(a, b):\n    return a + b  # once\n",
        "tests/__init__.py": "",
        "tests/test_sums.py": "from shardformer.sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)


def test_command_prints_survivors_and_fails(tmp_path, monkeypatch, capsys):
    row = {"file": "sums.py", "before": "a + b", "cost": "wrong sums", "tests": ("test_sums.py",)}
    noticed = Mutant("minus", after="a - b", **row)
    unnoticed, equivalent = Mutant("times", after="a * b", **row), Mutant("swapped", after="b + a", **row)
    equivalent = Mutant(**vars(equivalent) | {"equivalent": "sums commute"})
    make_checkout(tmp_path, monkeypatch, noticed, unnoticed, equivalent)
    assert command.main([]) == 1
    said = capsys.readouterr().out
    assert "1/3 minus: killed by tests/test_sums.py::test_add" in said
    assert "2/3 times: SURVIVED" in said
    assert "3 mutants: 1 killed, 1 equivalent, 1 survived" in said
    assert command.main(["minus", "swapped"]) == 0
    assert "a + b  # once" in (tmp_path / "shardformer/sums.py").read_text()


def test_test_that_always_fails_kills_nothing(tmp_path, monkeypatch, capsys):
    make_checkout(
        tmp_path, monkeypatch, Mutant("minus", "sums.py", "a + b", "a - b", "wrong sums", ("test_sums.py",))
    )
    (tmp_path / "tests/test_sums.py").write_text("def test_add():\n    assert False\n")
    assert command.main([]) == 1
    assert "tests/test_sums.py::test_add fails without it too" in capsys.readouterr().out
