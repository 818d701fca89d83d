"""The special token ids of a published model, as a run keeps them."""

import json

import numpy as np
import pytest

from shardformer.data import SpecialTokens, load_special_tokens
from shardformer.data.special_tokens import FILE
from shardformer.errors import RunError
from shardformer.training.run_folder import Run
from tests import runs

LLAMA_3 = SpecialTokens(128000, (128001, 128009), None, {"eos_token_id": [128001, 128009], "attention_dropout": 0.0})


def write(folder, tokens):
    for name, text in tokens.documents().items():
        (folder / name).write_text(text)


def test_special_tokens_are_read_as_they_were_written(tmp_path):
    write(tmp_path, LLAMA_3)
    assert load_special_tokens(tmp_path) == LLAMA_3


def test_no_special_tokens_write_no_file(tmp_path):
    assert SpecialTokens().documents() == {}
    assert load_special_tokens(tmp_path) == SpecialTokens()


@pytest.mark.parametrize(
    "changes",
    [{"eos_token_id": 2}, {"eos_token_id": [-1]}, {"bos_token_id": "1"}, {"config": []}, {"pad_token_id": 0.5}],
)
def test_damaged_special_tokens_are_rejected(changes, tmp_path):
    write(tmp_path, LLAMA_3)
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(content | changes))
    with pytest.raises(RunError, match=r"special_tokens\.json is damaged"):
        load_special_tokens(tmp_path)


@pytest.mark.slow
def test_special_tokens_go_from_base_to_run_to_checkpoint(tmp_path):
    (tmp_path / "ids.bin").write_bytes(np.tile(np.arange(64), 100).astype("<u2").tobytes())
    settings = ["steps=2", "warmup=1", "batch=8", "mesh=1x1", f"data={tmp_path / 'ids.bin'}"]
    assert runs.train("tiny", *settings, "vocab=64", f"out={tmp_path / 'base'}") == 0
    kept = SpecialTokens(0, (2, 3), 1)
    write(tmp_path / "base", kept)
    assert runs.train(f"base={tmp_path / 'base'}", *settings, f"out={tmp_path / 'run'}") == 0
    assert Run.open(tmp_path / "run").special_tokens == kept
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    assert load_special_tokens(next(checkpoint.rglob(FILE)).parent) == kept
