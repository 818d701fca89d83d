"""`legacy --check` and code that still runs: each row has a program with other results than jax 0.4.13's."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.legacy import silent_changes
from shardformer.legacy.removed_uses import find_removed_uses
from shardformer.legacy.silent_uses import find_silent_changes, relevant_uses

from .record_silent import flat_result
from .silent_programs import IMPORTS, PROGRAMS

GOLDENS = Path(__file__).parent / "goldens"
THEN, TODAY = (json.loads((GOLDENS / f"silent_{version}.json").read_text()) for version in ("0.4.13", "0.12.0"))
PROJECT = Path(__file__).parents[2] / "shardformer"
MESH_TRANSFORMER = os.environ.get("MESH_TRANSFORMER_JAX", "")
# The folder `examples` of dm-haiku 0.0.10's sources: `pip download --no-deps --no-binary :all: dm-haiku==0.0.10`.
HAIKU_EXAMPLES = os.environ.get("HAIKU_EXAMPLES", "")


def named(source):
    return relevant_uses([find_silent_changes(source)])[0]


def equal(found, expected):
    """Compares dtypes, shapes and booleans exactly, and numbers to the rounding of another compiler."""
    if [each[:2] for each in found] != [each[:2] for each in expected]:
        return False
    return all(map(equal_numbers, (each[2] for each in found), (each[2] for each in expected)))


def equal_numbers(found, expected):
    if found == expected or {"True", "False"} & {*found, *expected}:
        return found == expected
    return np.allclose(np.array(found, float), np.array(expected, float), rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_changed_line_is_named_and_its_twin_is_not(program):
    for source in PROGRAMS[program]:
        lines = (IMPORTS + source).splitlines()
        expected = [number for number, line in enumerate(lines, 1) if line.endswith("# changed")]
        assert [use.line for use in named(IMPORTS + source)] == expected, source
    assert "# changed" in PROGRAMS[program].changed


@pytest.mark.parametrize("program", PROGRAMS)
def test_recorded_results_changed_and_the_twins_did_not(program):
    assert not equal(THEN[program][0], TODAY[program][0])
    assert equal(THEN[program][1], TODAY[program][1])


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings(
    "ignore:Specifying a key:UserWarning", "ignore:jax.experimental.shard_map:DeprecationWarning"
)
def test_programs_give_the_recorded_results_today(program):
    then_is_today = program == "empty" and jax.__version_info__ < (0, 11)
    before = jax.config.jax_threefry_partitionable, jax.config.jax_default_prng_impl
    expected = (THEN if then_is_today else TODAY)[program]
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for source, result in zip(PROGRAMS[program], expected, strict=True):
                assert equal(flat_result(IMPORTS + source), result), source
    finally:
        jax.config.update("jax_threefry_partitionable", before[0])
        jax.config.update("jax_default_prng_impl", before[1])


def test_every_row_has_a_program():
    rows = [value for value in vars(silent_changes).values() if isinstance(value, silent_changes.SilentChange)]
    rows += [*silent_changes.ALWAYS.values(), *(row[1] for row in silent_changes.CALLS.values())]
    rows += [silent_changes.SMALL_RANDINT[1], silent_changes.RBG_VMAP[1]]
    shown = {use.change for pair in PROGRAMS.values() for use in named(IMPORTS + pair.changed)}
    assert set(rows) - shown == set()


def test_the_table_names_the_release_and_the_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import jax.numpy as jnp\n\nx = jnp.empty(3)\n")
    assert main(["legacy", "--check", "a.py"]) == 0
    out = capsys.readouterr().out
    assert "a.py:3  jax.numpy.empty  jax 0.11.0: the array is uninitialized; jax.numpy.zeros" in out
    assert "1 use with other results than jax 0.4.13's" in out


def test_cells_of_notebooks_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = [{"cell_type": "code", "source": source} for source in ("import jax", "jax.random.split(k)")]
    (tmp_path / "a.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    assert main(["legacy", "--check", "a.ipynb"]) == 0
    assert "a.ipynb: code cell 2, line 1  jax.random.split  jax 0.5.0" in capsys.readouterr().out


def test_a_tree_that_needs_a_later_jax_has_seen_the_change():
    draws = find_silent_changes("import jax\njax.random.normal(k)\njax.numpy.empty(3)")
    modern = find_silent_changes("import jax\njax.set_mesh(mesh)")
    assert [use.name for use in relevant_uses([draws, modern])[0]] == ["jax.numpy.empty"]
    assert [use.name for use in relevant_uses([draws])[0]] == ["jax.random.normal", "jax.numpy.empty"]


def test_a_tree_that_sets_the_option_chose_its_draws():
    draws = find_silent_changes("import jax\njax.random.normal(k)")
    option = find_silent_changes("import jax\njax.config.update('jax_threefry_partitionable', False)")
    assert relevant_uses([draws, option])[0] == []


def test_this_project_has_no_silent_change():
    findings = [find_silent_changes(path.read_bytes()) for path in PROJECT.rglob("*.py")]
    assert [use for found in relevant_uses(findings) for use in found] == []


@pytest.mark.skipif(not MESH_TRANSFORMER, reason="MESH_TRANSFORMER_JAX is not set")
def test_mesh_transformer_has_other_draws_and_nothing_else():
    findings = [find_silent_changes(path.read_bytes()) for path in sorted(Path(MESH_TRANSFORMER).rglob("*.py"))]
    uses = [use for found in relevant_uses(findings) for use in found]
    assert {use.change for use in uses} == {silent_changes.THREEFRY}
    assert len(uses) == 17


@pytest.mark.skipif(not HAIKU_EXAMPLES, reason="HAIKU_EXAMPLES is not set")
def test_haikus_examples_have_other_draws_and_nothing_else():
    sources = [path.read_bytes() for path in sorted(Path(HAIKU_EXAMPLES).rglob("*.py"))]
    uses = [use for found in relevant_uses([find_silent_changes(source) for source in sources]) for use in found]
    assert {use.change for use in uses} == {silent_changes.THREEFRY}
    assert len(uses) == 12
    removed = [(use.name, use.status) for source in sources for use in find_removed_uses(source)]
    assert removed == [("jax.device_put_sharded", "covered")]


@pytest.mark.parametrize("lines", ["x = jnp.asarray(x)", "x = x[0]", "x = y + 1\n    y = x + 1"])
def test_a_name_that_depends_on_itself_is_read(lines):
    source = f"{IMPORTS}def f(x, y):\n    {lines}\n    return jnp.mean(x), jnp.trace(x), x.split(y)\n"
    assert named(source) == []
    assert find_removed_uses(source) == []


def test_equal_notices_each_difference():
    one = [["float32", [2], ["1.0", "2.0"]]]
    assert equal(one, [["float32", [2], ["1.0", "2.00001"]]])
    for other in ([["float32", [2], ["1.0", "2.1"]]], [["int32", [2], ["1.0", "2.0"]]], [["float32", [1], ["1.0"]]]):
        assert not equal(one, other)
    assert not equal([["bool", [], ["True"]]], [["bool", [], ["False"]]])
