"""Chooses the cases of the short tier, for tests that compile where an exact test has all cases."""

import os

import pytest

ALL_CASES = "ALL_CASES" in os.environ  # set each night; the full tier has some of them


def shorten(cases, count: int = 1) -> list:
    """Returns the cases for `parametrize`; those after the first `count` are of the full tier."""
    cases = list(cases)
    return [*cases[:count], *(pytest.param(*_as_tuple(case), marks=pytest.mark.slow) for case in cases[count:])]


def at_night(case):
    """Returns a case for `parametrize` that only `scripts/test.sh night` runs."""
    return pytest.param(*_as_tuple(case), marks=pytest.mark.nightly)


def _as_tuple(case) -> tuple:
    return case if isinstance(case, tuple) else (case,)
