"""Each command with a `://` path: it works as on a disk, or one line names the alternative."""

import json

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.cli import base_model
from shardformer.convert import shard_files
from shardformer.convert.weight_files import find_tensors
from shardformer.storage import BucketPath
from tests.convert.hf_models import FOLDER
from tests.surroundings import open_memory_buckets

USAGE = 2
RUN, HF = "gs://bucket/runs/lr=0.1", "gs://bucket/hf"


@pytest.fixture(scope="module", autouse=True)
def bucket_in_memory(tmp_path_factory):
    """A bucket in memory with a Hugging Face folder, a run converted from it, and texts."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        open_memory_buckets(patch)
        patch.setenv("SHARDFORMER_CACHE", str(cache))
        upload(FOLDER / "gpt2", "hf")
        place = BucketPath("gs", "bucket", "texts")
        (place / "ids.txt").write_bytes(b"1 2 3 4 5")
        (place / "prompts.txt").write_bytes(b"1 2\n3 4\n")
        assert main(["convert", HF, RUN, "tokenizer=ids"]) == 0
        yield


def upload(folder, key):
    for path in folder.rglob("*"):
        if path.is_file():
            BucketPath("gs", "bucket", f"{key}/{path.relative_to(folder).as_posix()}").write_bytes(path.read_bytes())


def lines(capsys, *words, status=0):
    capsys.readouterr()
    assert main([*map(str, words)]) == status
    return capsys.readouterr().out.splitlines()


def test_reading_commands_accept_a_bucket(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert any(f'"out": "{RUN}"' in line for line in lines(capsys, "show", RUN))
    first, second, *_ = lines(capsys, "inspect", RUN)
    assert first == f"{RUN}/step_00000000"
    assert second.startswith("step 0, best validation")
    assert len(lines(capsys, "inspect", HF)) > 10
    assert lines(capsys, "diff", RUN, f"{RUN}/step_00000000")[-1].endswith("equal, 0 different")
    assert lines(capsys, "plan", RUN, "chip=v5e:1x1", "compiler=none", "mesh=1x1")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_text_commands_accept_a_bucket(capsys):
    (score,) = lines(capsys, "score", RUN, "gs://bucket/texts/ids.txt")
    assert json.loads(score)["tokens"] == 4
    found = lines(capsys, "generate", RUN, "prompts=gs://bucket/texts/prompts.txt", "tokens=2")
    assert [json.loads(line)["prompt"] for line in found] == ["1 2", "3 4"]
    assert lines(capsys, "sample", RUN, "prompt=1 2", "tokens=2")[-1].startswith("1 2 ")


def test_bucket_model_converts_to_a_disk_and_back(capsys, tmp_path):
    lines(capsys, "convert", RUN, tmp_path / "back", "format=hf")
    ours, theirs = (find_tensors(folder) for folder in (tmp_path / "back", FOLDER / "gpt2"))
    kept = ours.keys() & theirs.keys()
    assert len(kept) > 10
    assert (tmp_path / "back" / "generation_config.json").is_file()  # stored in the run by convert
    assert all(np.array_equal(ours[name].read(), theirs[name].read()) for name in kept)


def test_bucket_shards_of_gptj_are_found(capsys, tmp_path):
    shard_files.write_shard(tmp_path, 0, [lambda: np.zeros((2, 2), np.float32)] * 16)
    upload(tmp_path, "gptj")
    assert len(lines(capsys, "inspect", "gs://bucket/gptj")) == 19
    assert main(["convert", "gs://bucket/gptj", str(tmp_path / "run"), "layers=1"]) != 0
    assert (
        "copying gs://bucket/gptj" not in (said := capsys.readouterr()).out
    )  # the copy of the previous command is used
    assert "shard" in said.err


def test_foreign_base_is_converted_from_a_copy(monkeypatch):
    called = []
    monkeypatch.setattr(base_model, "convert_once", lambda _, *folders: called.append(folders[:2]) or RUN)
    config = base_model.parse_base([f"base={HF}", "out=gs://bucket/runs/tuned"])
    ((source, target),) = called
    assert source.endswith("bucket/hf")
    assert target.name == "tuned.base"
    assert config.training.base == RUN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "tiny", "data=gs://bucket/gone"], "gs://bucket/gone does not exist"),
        (["train", "tiny", "data=builtin", "base=gs://bucket/gone"], "base=gs://bucket/gone does not exist"),
        (["train", "base=gs://bucket/gone", "data=builtin"], "base=gs://bucket/gone does not exist"),
        (["train", "tiny", "data=builtin", "out=ftp://bucket/run"], "is not a supported location"),
        (["convert", "gs://bucket/gone", "here"], "gs://bucket/gone does not exist"),
        (["convert", RUN, "gs://bucket/new"], "in a bucket, where only runs are written; give a folder on a disk"),
        (["inspect", "gs://bucket/gone"], "gs://bucket/gone does not exist"),
        (["plot", RUN, "out=gs://bucket/x.png"], "out=gs://bucket/x.png must be on a disk; name a path there"),
        (["plot", "gs://bucket/gone"], "gs://bucket/gone is not a run"),
        (["plan", "tiny", "chip=v5e:2x4", "sweep=true", "picture=gs://b/x.png"], "picture=gs://b/x.png must be on a"),
        (["memory", "tiny", "picture=s3://b/x.png"], "picture=s3://b/x.png must be on a disk"),
        (["bench", "step", "json=gs://b/x.json"], "json=gs://b/x.json must be on a disk"),
        (["explain", "pictures=gs://b/x"], "pictures=gs://b/x must be on a disk"),
        (
            ["data", "prepare", "gs://bucket/texts", "out=gs://bucket/tokens"],
            "out=gs://bucket/tokens must be on a disk",
        ),
        (["data", "import", "gs://bucket/texts/ids.txt"], "INPUT.TXT=gs://bucket/texts/ids.txt must be on a disk"),
        (["data", "show", "gs://bucket/texts"], "is not a prepared folder"),
        (["score", RUN, "gs://bucket/gone.txt"], "gs://bucket/gone.txt does not exist"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bucket_paths_that_are_rejected(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == USAGE
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
