"""The tests of jax 0.4.13, dm-haiku 0.0.9 and optax 0.1.5 that fail under `legacy` are listed, with the reason."""

import json
import re
from pathlib import Path

import pytest

import shardformer.legacy
from tests.legacy.old_jax_words import in_todays_words

HERE = Path(__file__).parent
LISTED = json.loads((HERE / "goldens" / "old_releases.json").read_text())
README = (Path(shardformer.legacy.__file__).parent / "README.md").read_text()


@pytest.mark.parametrize("file", LISTED)
def test_each_name_has_one_reason(file):
    suite = LISTED[file]
    names = [name for names in suite["not passing"].values() for name in names]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"\w+::\S+", name) for name in names)
    assert all(len(why) > 20 for why in suite["not passing"])
    assert suite["passed there"] > 200


@pytest.mark.parametrize("file", LISTED)
def test_readme_has_the_counts(file):
    suite = LISTED[file]
    total = suite["passed there"]
    passing = total - sum(map(len, suite["not passing"].values()))
    row = next(line for line in README.splitlines() if line.startswith(f"| `{file}`"))
    private = sum(len(names) for why, names in suite["not passing"].items() if "private" in why)
    assert row == f"| `{file}` | {passing} of {total} | {100 * passing // total}% | {passing} of {total - private} |"


@pytest.mark.parametrize(
    ("then", "today"),
    [
        ("Received incompatible devices for pjitted computation. Got argument x of .*",
         "Received incompatible devices for jitted computation. Got argument x of f"),
        (r"Resource axis: x of.*P\('x',\) is undefined", "Resource axis: x of P('x',) is not found in mesh: ('z',)."),
        (r"One of pjit outputs with pytree key path \['r'\].*P\('x', None\).*implies that the global size of its "
         "dimension 0 should be divisible by 2, but it is equal to 3",
         "spec=P('x', None), memory_kind=device) implies that array axis 0 is partitioned 2 times, but the dimension "
         "size is 3 (full shape: (3, 2))"),
        ("compiling computation that requires \\d+ logical devices, but only",
         "pmap got an axis of size 9, which requires 9 replicas, but has 8 devices"),
    ],
)  # fmt: skip
def test_words_keep_the_facts(then, today):
    assert re.search(in_todays_words(then), today)
    assert not re.search(then, today)
    assert not re.search(in_todays_words(then), today.replace("x", "y").replace("9", "n"))
