"""Fixtures of the tests of `bench`."""

import jax
import pytest


@pytest.fixture
def promotion():
    """Allows the implicit promotions that the reference uses."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
