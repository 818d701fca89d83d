"""The recorded folders, as mesh-transformer-jax wrote them."""

import tarfile
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """One folder per model."""
    folder = tmp_path_factory.mktemp("gptj")
    with tarfile.open(GOLDENS / "gptj.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
