"""The legacy suite runs with deprecation warnings as errors: a warning is a name that jax is about to remove."""

import gc
import sys
from pathlib import Path

import pytest

from shardformer.legacy.migration import shard_map_helpers

HERE = Path(__file__).parent

# The accepted warnings, with the reason. All come from legacy programs, or from libraries that they use.
ACCEPTED = {
    ".with mesh": "legacy programs enter meshes; shardformer.legacy defines the form if jax drops it",
}


def pytest_collection_modifyitems(items):
    accepted = [f"ignore:{message}:DeprecationWarning" for message in ACCEPTED]
    filters = pytest.mark.filterwarnings("error::DeprecationWarning", *accepted)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(filters, append=False)  # a test's own filters come after these


@pytest.fixture
def helpers(monkeypatch):
    """The helpers as the patch of `--migrate` puts them beside a file."""
    monkeypatch.setitem(sys.modules, "shard_map_helpers", shard_map_helpers)


@pytest.fixture
def collect_young():
    """Yields a function that frees what only cycles of this test hold: a look at all objects takes seconds."""
    gc.disable()  # so that all objects of the test stay in the youngest generation
    yield lambda: gc.collect(0)
    gc.enable()
