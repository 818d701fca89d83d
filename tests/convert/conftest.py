"""The recorded folders, as mesh-transformer-jax wrote them, and conversions that must fail."""

import tarfile
from pathlib import Path

import pytest

from shardformer.__main__ import main
from tests.runs import FAILED, USAGE

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """One folder per model."""
    folder = tmp_path_factory.mktemp("gptj")
    with tarfile.open(GOLDENS / "gptj.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture
def refused(tmp_path, capsys):
    """Gives a wrong conversion, and checks that one line says what is wrong and that DST is not there."""

    def refuse(status, message, source, *words):
        before = sorted(path.name for path in tmp_path.iterdir())
        assert convert(source, tmp_path / "dst", *words) == status
        error = capsys.readouterr().err
        assert error.startswith({USAGE: "shardformer: error: ", FAILED: "shardformer: failed: "}[status])
        assert error.count("\n") == 1
        assert message in error
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    return refuse
