"""Checkpoint tests run on every kind of place, from the same code."""

import pytest

from shardformer.storage import requests
from tests.checkpoint import places
from tests.surroundings import open_buckets


@pytest.fixture(scope="session")
def emulators():
    running = places.start_emulators() if places.EMULATORS else []
    yield
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def memory_buckets():
    with pytest.MonkeyPatch.context() as patch:
        open_buckets(patch, places.open_bucket)
        patch.setitem(requests.ADVICE, "memory", requests.ADVICE["s3"])
        yield


@pytest.fixture(scope="module", params=places.KINDS)
def kind(request):
    if request.param in ("s3", "gs"):
        request.getfixturevalue("emulators")
    return request.param


@pytest.fixture
def out(kind, tmp_path):
    """A run folder, which does not exist yet."""
    return places.new_place(kind, tmp_path)
