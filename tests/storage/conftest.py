"""An unused folder of a bucket, in memory and on the stand-ins, and an empty cache for every test."""

import pytest

from tests.checkpoint import places
from tests.checkpoint.conftest import emulators, memory_buckets  # noqa: F401 (fixtures)


@pytest.fixture(params=places.KINDS[1:])
def place(request, monkeypatch, tmp_path):
    if request.param != "memory":
        request.getfixturevalue("emulators")
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    return places.new_place(request.param, tmp_path)
