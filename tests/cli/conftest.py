"""A trained run, and the check of every failing command."""

import shutil
from pathlib import Path

import pytest

from shardformer.__main__ import main
from shardformer.training.trainer import Trainer
from tests import runs
from tests.runs import FAILED, USAGE


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert runs.train("tiny", "mesh=4x2", f"data={text}", "steps=4", f"out={out}") == 0
    return out


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, for a test that changes it."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Returns a function that runs a failing command and checks its status, its one line and that no file changed.

    Training compiles its step while it reads files. No failing command takes a step, so no step is compiled.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "lower", lambda *_: [])

    def refuse(status: int, message: str, *words):
        before = snapshot(tmp_path)
        command, *rest = map(str, words)
        assert (runs.train(*rest) if command == "train" else main([command, *rest])) == status
        error = capsys.readouterr().err
        prefix = {USAGE: "shardformer: error: ", FAILED: "shardformer: failed: "}[status]
        assert error.startswith(prefix)
        assert error.count("\n") == 1  # one message, and no traceback
        assert message in error
        assert snapshot(tmp_path) == before

    return refuse


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
