"""The table of mutants is up to date."""

import ast
import collections
import functools

import pytest

from tests.mutants.table import ROOT, Mutant, find_tests, read_table

MUTANTS = read_table()


@functools.cache
def find_statements(source: str) -> list[tuple[int, int]]:
    """Returns the first and last line of each statement of a module."""
    nodes = ast.parse(source).body
    return [
        (min(part.lineno for part in [node, *getattr(node, "decorator_list", ())]), node.end_lineno) for node in nodes
    ]


def split_changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """Returns the lines of the module's statement that differs, before and after; parsing all takes seconds."""
    old, new = before.splitlines(), after.splitlines()
    line = next(number for number, pair in enumerate(zip(old, new, strict=False), 1) if len(set(pair)) > 1)
    ((first, last),) = [lines for lines in find_statements(before) if lines[0] <= line <= lines[1]]
    return old[first - 1 : last], new[first - 1 : last + len(new) - len(old)]


def describe(lines: list[str]) -> str:
    """Returns the code without its comments."""
    return ast.dump(ast.parse("\n".join(lines)))


def test_every_row_changes_the_code():
    """A row whose text has changed raises; each mistake must be Python and change what is computed."""
    for mutant in MUTANTS:
        source = (ROOT / mutant.path).read_text()
        assert "\n" not in mutant.before, mutant.name
        before, after = split_changed(source, mutant.change(source))
        assert describe(before) != describe(after), mutant.name


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
