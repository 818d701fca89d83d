"""Random programs of xmap equal a loop over all instances, to 1e-7 of their scale: see operation_programs.py.

Both run in the exact interpreter. Some are compiled as well, and differ by ten times the rounding to float32 at most.
Five programs of each group run; all 306 with ALL_CASES=1.
"""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact, legacy
from tests import tiers
from tests.legacy import operation_programs
from tests.legacy.gradient_programs import make_psum_without_transpose
from tests.legacy.instance_operations import OPERATIONS
from tests.legacy.operation_programs import GROUPS, draw_arguments, programs

PROGRAMS_IN_A_GROUP = 17 if tiers.ALL_CASES else 5
OF_EACH_MODE = (0, 7, 15)  # groups that differ in their layout too
COMPILED = (2, 9, 13)
TOLERANCE = 1e-7  # both are in float64: most differ by 1e-16, one that amplifies rounding by 1.5e-9


def run_exactly(function, *arguments, **options):
    return exact.run(function, *arguments, **options).outputs


def run_compiled(function, *arguments):
    return function(*arguments)


@pytest.fixture(autouse=True)
def options_of_that_time():
    with legacy.installed(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def find_errors(seeds, group, run=run_exactly) -> dict:
    """Returns for each program the largest error of an array, relative to the array's scale."""
    mapped, of_all = programs(seeds, group)
    arguments = draw_arguments(seeds, group)
    results, expected = run(mapped, *arguments), run_exactly(of_all, *arguments)
    pairs = zip(seeds, results, expected, strict=True)
    return {seed: max(map(error_of, jax.tree.leaves(ours), jax.tree.leaves(theirs))) for seed, ours, theirs in pairs}


def error_of(ours, theirs) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6)


def seeds_of(group, count=PROGRAMS_IN_A_GROUP):
    return range(1000 * group, 1000 * group + count)


@pytest.mark.parametrize("group", OF_EACH_MODE)
def test_program_of_each_mode(group):
    assert max(find_errors(seeds_of(group, 2), group).values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_programs(group):
    assert {seed: error for seed, error in find_errors(seeds_of(group), group).items() if not error < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("group", COMPILED)
def test_compiled_programs(group):
    seeds = seeds_of(group, 6 if tiers.ALL_CASES else 2)
    rounding = find_errors(seeds, group, functools.partial(run_exactly, floats="stored"))
    errors = find_errors(seeds, group, run_compiled)
    assert {seed: error for seed, error in errors.items() if not error < 1e-3 + 10 * rounding[seed]} == {}


def test_another_transpose_of_psum_is_seen(broken):
    broken(operation_programs.lax, "psum", make_psum_without_transpose())
    assert max(find_errors(seeds_of(0, 3), 0).values()) > 1e-3


def test_each_operation_has_another_name():
    assert len({operation.__name__ for operation in OPERATIONS}) == len(OPERATIONS) == 39
