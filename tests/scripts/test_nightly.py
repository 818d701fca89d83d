"""The nightly workflow runs what .ci/run runs: the same people's code, by the same variables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NIGHTLY = (ROOT / ".github/workflows/nightly.yml").read_text()


def read_variables(text: str, pattern: str) -> dict[str, str]:
    """Returns {variable: path below the folder of other people's code}."""
    return dict(re.findall(pattern, text, re.MULTILINE))


def test_variables_are_those_of_ci():
    local = read_variables((ROOT / ".ci/run").read_text(), r'^export_if_present (\w+) "\$peers/(.+)"$')
    nightly = read_variables(NIGHTLY, r'echo "(\w+)=\$RUNNER_TEMP/(.+)"')
    assert local == nightly
    assert len(local) == 4


def test_each_variable_is_read_by_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests/legacy").glob("*.py"))
    tests += "".join(path.read_text() for path in (ROOT / "tests/convert").glob("*.py"))
    for name in read_variables(NIGHTLY, r'echo "(\w+)=\$RUNNER_TEMP/(.+)"'):
        assert f'"{name}"' in tests, name


def test_code_is_pinned_and_in_the_folder_of_its_variable():
    fetched = re.findall(r"^ +fetch (\S+) \S+ ([0-9a-f]{40}|refs/tags/\S+)$", NIGHTLY, re.MULTILINE)
    folders = {path.split("/")[0] for path in read_variables(NIGHTLY, r'echo "(\w+)=\$RUNNER_TEMP/(.+)"').values()}
    assert {folder for folder, _ in fetched} == folders


def test_nightly_runs_the_tiers_and_the_mutants():
    assert "bash scripts/test.sh night" in NIGHTLY
    assert "bash scripts/test.sh next" in NIGHTLY
    assert "python -m tests.mutants" in NIGHTLY
