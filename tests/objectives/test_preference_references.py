"""A run on preference pairs: references of the start, computed once, and a resume that is bitwise."""

import csv
import json
import os

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.objectives import preference_references
from tests import runs
from tests.data.chat.chats import write_lines

KEYS = ["tiny", "mesh=2x1", "tokenizer=bytes", "seq=32", "objective=dpo", "steps=4", "eval_every=4", "batch=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a run of 4 steps that was stopped after 2 and resumed, and of one that was not."""
    folder = tmp_path_factory.mktemp("preferences")
    records = [{"prompt": f"{n}? ", "chosen": f"yes {n}", "rejected": f"no, {n}"} for n in range(60)]
    pairs = write_lines(folder / "pairs.jsonl", records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFORMER_CACHE", str(folder / "cache"))
        assert runs.train(*KEYS, f"data={pairs}", f"out={folder}/stopped", stop_after=2) == 0
        assert runs.train("--resume", f"{folder}/stopped") == 0
        assert runs.train(*KEYS, f"data={pairs}", f"out={folder}/through") == 0
        yield folder


def read_index(folder) -> dict:
    return json.loads((folder / "references" / "index.json").read_text())


@pytest.mark.slow
def test_resumed_run_is_that_of_one_start(finished):
    stopped, through = (runs.rows(finished / name) for name in ("stopped", "through"))
    assert [row["loss"] for row in stopped] == [row["loss"] for row in through]
    assert read_index(finished / "stopped") == read_index(finished / "through")


def test_first_step_compares_the_model_with_itself(finished):
    """The reference is the start: the loss of the first step is log 2, and every reward is 0."""
    with open(finished / "through" / "metrics.csv", newline="") as file:
        first, *_, last = csv.DictReader(file)
    assert float(first["loss"]) == pytest.approx(np.log(2), abs=1e-6)
    assert abs(float(first["reward_margin"])) < 1e-5
    assert float(last["reward_margin"]) > 1e-4
    assert float(last["val_accuracy"]) >= 0.5


def test_index_names_the_weights_and_the_data(finished):
    index = read_index(finished / "through")
    assert len(index["weights"]) == 64
    assert index["data"].startswith("2-")
    assert sum(len(split["logp"]) for split in index["splits"].values()) == 2 * 60


def test_damaged_references_are_rejected(finished, capsys):
    path = finished / "stopped" / "references" / "index.json"
    content = path.read_text()
    index = json.loads(content)
    next(iter(index["splits"].values()))["logp"][0] += 1
    path.write_text(json.dumps(index))
    assert runs.train("--resume", f"{finished}/stopped", "steps=5") == runs.FAILED
    assert "index.json is damaged; remove it" in capsys.readouterr().err
    path.unlink()  # computed again, from the weights of the start
    assert runs.train("--resume", f"{finished}/stopped", "steps=5") == 0
    assert read_index(finished / "stopped") == json.loads(content)


def test_strange_references_are_rejected(finished, capsys):
    path = finished / "stopped" / "references" / "index.json"
    content = path.read_text()
    index = json.loads(content)
    next(iter(index["splits"].values()))["logp"][0] = 10**400  # is no float
    for strange in ("[" * 200_000, json.dumps(index)):
        path.write_text(strange)
        assert runs.train("--resume", f"{finished}/stopped", "steps=5") == runs.FAILED
        assert "index.json is damaged" in capsys.readouterr().err
    path.write_text(content)


def test_evaluation_reads_the_references(finished, capsys):
    assert main(["eval", f"{finished}/through", "split=validation"]) == 0
    assert "dpo loss" in capsys.readouterr().out


def test_incomplete_part_is_computed_again(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    preference_references._write_part(tmp_path / "x" / "part.npy", values)
    np.testing.assert_array_equal(preference_references._read_part(tmp_path / "x" / "part.npy", (3, 2)), values)
    assert preference_references._read_part(tmp_path / "x" / "part.npy", (4, 2)) is None
    (tmp_path / "x" / "part.npy").write_bytes(b"\x93NUMPY")
    assert preference_references._read_part(tmp_path / "x" / "part.npy", (3, 2)) is None


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,)}\n"


@pytest.mark.parametrize("header", ["(" * 4000, HUGE])
def test_strange_part_is_computed_again(tmp_path, header):
    part = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    (tmp_path / "part.npy").write_bytes(part)
    assert preference_references._read_part(tmp_path / "part.npy", (3, 2)) is None


def test_pipe_instead_of_a_part_is_computed_again(tmp_path):
    os.mkfifo(tmp_path / "part.npy")
    assert preference_references._read_part(tmp_path / "part.npy", (3, 2)) is None
