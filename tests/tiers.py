"""Chooses the cases of the short tier, for tests that compile where an exact test has all cases."""

import os

import pytest

ALL_RANDOM_CASES = "ALL_RANDOM_CASES" in os.environ  # set each night; the full tier has some of them


def shorten(cases, count: int = 1) -> list:
    """Returns the cases for `parametrize`; those after the first `count` are of the full tier."""
    cases = list(cases)
    return [*cases[:count], *(pytest.param(*_as_tuple(case), marks=pytest.mark.slow) for case in cases[count:])]


def _as_tuple(case) -> tuple:
    return case if isinstance(case, tuple) else (case,)
