"""A finished run that several test files read."""

import pytest

from tests import runs
from tests.training.uneven_run import uneven_words


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, text):
    """The folder of an uninterrupted run with dropout."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert runs.train(*uneven_words(text), f"out={out}", sample=True, curves=True) == 0
    return out
