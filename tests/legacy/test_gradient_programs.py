"""The gradients of random bodies with collectives equal those of jax 0.4.13: see gradient_programs.py.

300 are recorded. Half of each group runs, exactly; all of them with GRADIENT_PROGRAMS_ALL=1. One group of each layout,
and one with xmaps in its bodies, is compiled as well.
"""

import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from shardformer import exact, legacy
from tests import tiers
from tests.legacy import gradient_programs
from tests.legacy.gradient_programs import GROUPS, PROGRAMS_IN_A_GROUP, call_now, layout_of, run_programs, summarize

SUMS_OF_AN_ARRAY = 5
NUMBER = PROGRAMS_IN_A_GROUP if "GRADIENT_PROGRAMS_ALL" in os.environ else PROGRAMS_IN_A_GROUP // 2
COMPILED = (*range(6), 30)


@functools.cache
def goldens():
    """Returns the seed and the recorded sums of each program."""
    found = np.load(Path(__file__).parent / "goldens" / "gradients_0.4.13.npz")
    sums = np.split(found["sums"], np.cumsum(found["lengths"])[:-1])
    return list(zip(map(int, found["seeds"]), sums, strict=True))


def call_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def differences(group, call, number=NUMBER):
    """Returns for the first programs the largest difference of an array's sums, relative to the array's scale."""
    start = GROUPS.index(group) * PROGRAMS_IN_A_GROUP
    programs = goldens()[start : start + number]
    with legacy.installed(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        results = run_programs([seed for seed, _ in programs], group, call=call)
    found = {}
    for (seed, expected), arrays in zip(programs, results, strict=True):
        scales = np.abs(expected.reshape(-1, SUMS_OF_AN_ARRAY)).max(1, keepdims=True)
        errors = np.abs(summarize(arrays) - expected).reshape(-1, SUMS_OF_AN_ARRAY)
        found[seed] = np.max(errors / np.where(scales < 1e-6, 1, scales))
    return found


@pytest.mark.parametrize("group", tiers.shorten(GROUPS, 2))
def test_gradients_equal_those_of_jax_0_4_13(group):
    assert_equal(group, call_exactly)


@pytest.mark.slow
@pytest.mark.parametrize("group", COMPILED)
def test_compiled_gradients_equal_those_of_jax_0_4_13(group):
    assert_equal(group, call_now)


def assert_equal(group, call):
    wrong = {seed: error for seed, error in differences(group, call).items() if not error < 2e-5}
    assert wrong == {}, layout_of(group)


def test_every_program_is_recorded():
    assert len(goldens()) == len(GROUPS) * PROGRAMS_IN_A_GROUP == len({seed for seed, _ in goldens()})


def test_another_transpose_of_psum_is_seen(broken):
    broken(gradient_programs.lax, "psum", gradient_programs.make_psum_without_transpose())
    assert max(differences(1, call_exactly, 6).values()) > 1e-3
