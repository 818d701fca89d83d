"""A run on documents, from text files to a resumed run, an evaluation and a sample."""

import json

import pytest

from shardformer.__main__ import main
from shardformer.data import builtin, load_vocabulary
from tests import runs


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Questions and answers, which a run reads as prompts and completions."""
    lines = [line for line in builtin.text()[:60_000].splitlines() if len(line) > 20]
    folder = tmp_path_factory.mktemp("records")
    texts = [json.dumps({"prompt": line[:8], "completion": line[8:]}) + "\n" for line in lines]
    for number in range(2):
        (folder / f"{number}.jsonl").write_text("".join(texts[number::2]))
    return folder


@pytest.mark.slow
def test_a_run_on_documents_stops_resumes_and_is_judged_by_bytes(records, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    words = ["tiny", "mesh=2x1", f"data={records}", "tokenizer=bpe:300", "documents=masked", "mask_prompt=true",
             "steps=6", "eval_every=3", "eval_batches=2"]  # fmt: skip
    assert runs.train(*words, f"out={tmp_path}/whole") == 0
    assert "tokenised" in capsys.readouterr().out
    assert runs.train(*words, f"out={tmp_path}/run", stop_after=2) == 0
    assert "tokenised" not in capsys.readouterr().out
    assert runs.train("--resume", f"{tmp_path}/run") == 0
    assert runs.rows(tmp_path / "run") == runs.rows(tmp_path / "whole")
    last = runs.rows(tmp_path / "run")[-1]
    assert 0 < float(last["val_nats_per_byte"]) < float(last["val_loss"])
    vocabulary, _ = load_vocabulary(tmp_path / "run")
    assert len(vocabulary) == 300
    capsys.readouterr()
    assert main(["sample", f"{tmp_path}/run", "prompt=naïve 日本", "tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("naïve 日本")
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["validation"]["nats_per_byte"] > 0
    assert runs.train("--resume", f"{tmp_path}/run", "tokenizer=bytes", "steps=7") == 2
    assert "tokenizer cannot change on resume" in capsys.readouterr().err
    (records / "0.jsonl").write_text((records / "1.jsonl").read_text())
    assert runs.train("--resume", f"{tmp_path}/run", "steps=7") == 2
    assert "is not what" in capsys.readouterr().err
