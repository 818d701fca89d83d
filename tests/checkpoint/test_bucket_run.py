"""The commands on a run in a bucket: the same promises as on a disk."""

import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.checkpoint import manifest
from shardformer.checkpoint.array_files import Reader
from shardformer.storage import bucket, local_folder, location
from tests import runs
from tests.checkpoint import places
from tests.surroundings import before_call

WORDS = ("tiny", "mesh=4x2", "steps=6", "eval_every=3", "save_every=2", "keep=9")


@pytest.fixture(autouse=True)
def a_scheme_for_memory(monkeypatch, tmp_path):
    monkeypatch.setitem(bucket.SCHEMES, "memory", "MemoryStore")
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=places.KINDS[1:])
def kind(request):
    if request.param != "memory":
        request.getfixturevalue("emulators")
    return request.param


def arrays(folder) -> dict:
    stored = manifest.read_manifest(folder)
    with Reader(folder, stored) as reader:
        wholes = {name: tuple((0, size) for size in leaf.shape) for name, leaf in stored.leaves.items()}
        return {name: reader.read_slices(name, [whole])[whole] for name, whole in wholes.items()}


def test_run_in_a_bucket_is_stopped_resumed_and_shown(out, tmp_path, text, capsys, monkeypatch):
    whole = tmp_path / "whole"
    assert runs.train(*WORDS, f"data={text}", f"out={whole}") == 0
    assert runs.train(*WORDS, f"data={text}", f"out={out}", stop_after=3) == 0
    assert f"resume with: python -m shardformer train --resume {out}" in capsys.readouterr().out
    reached = checkpoint.list_steps(location(str(out)))[-1]
    assert 3 <= reached < 6
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "another machine"))
    assert runs.train("--resume", out, f"data={text}", curves=True) == 0
    assert f"resuming from step {reached}" in capsys.readouterr().out
    resumed, expected = (arrays(checkpoint.step_folder(place, 6)) for place in (out, whole))
    assert resumed.keys() == expected.keys()
    assert all(np.array_equal(resumed[name], expected[name]) for name in expected)
    assert runs.rows(local_folder(out)) == runs.rows(whole)
    uploaded = set(bucket.list_objects(out))
    assert uploaded >= {"config.json", "vocabulary.json", "metrics.csv", "curves.png", "final.json"}
    assert any(name.startswith("tensorboard/events") for name in uploaded)
    assert (out / "metrics.csv").read_bytes() == (local_folder(out) / "metrics.csv").read_bytes()

    for command, said in (("inspect", "all checksums right"), ("plot", "wrote ")):
        assert main([command, str(out), *([f"out={tmp_path}/runs.png"] if command == "plot" else [])]) == 0
        assert said in capsys.readouterr().out
    assert main(["diff", str(out), str(whole)]) == 0
    assert main(["show", str(out)]) == 0
    assert f'"out": "{out}"' in capsys.readouterr().out
    assert main(["eval", str(out), "split=validation", "mesh=4x2"]) == 0
    on_bucket = capsys.readouterr().out
    assert main(["eval", str(whole), "split=validation", "mesh=4x2"]) == 0
    assert capsys.readouterr().out == on_bucket
    assert main(["train", *WORDS, f"data={text}", f"out={out}"]) == 2
    assert f"{out} already holds a run; go on with `train --resume {out}`" in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_checkpoint_is_set_aside_on_resume(out, text, capsys):
    assert runs.train(*WORDS, f"data={text}", f"out={out}") == 0
    newest = checkpoint.step_folder(out, 6)
    path = places.object_of(newest, "arrays.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert runs.train("--resume", out, "steps=7", f"data={text}") == 0
    said = capsys.readouterr().out
    assert f"it is now {newest}/manifest.damaged.json, and the run goes on from step 4" in said
    assert checkpoint.list_steps(out)[-2:] == [6, 7]
    assert (newest / "manifest.damaged.json").exists()


def test_run_in_a_bucket_serves_as_base(out, text):
    assert runs.train(*WORDS, f"data={text}", f"out={out}") == 0
    assert runs.train(*WORDS, f"data={text}", f"out={out}-tuned", f"base={out}") == 0
    tuned = location(f"{out}-tuned")
    assert checkpoint.list_steps(tuned)[-1] == 6
    assert f'"base": "{out}"' in (tuned / "config.json").read_bytes().decode()


@pytest.mark.slow
def test_reading_a_run_does_not_touch_its_local_records(out, text):
    assert runs.train(*WORDS, f"data={text}", f"out={out}") == 0
    path = local_folder(out) / "metrics.csv"
    path.write_text(path.read_text() + "written since the last save")
    (local_folder(out) / "new.csv").touch()
    before = path.read_bytes()
    assert main(["show", str(out)]) == 0
    with checkpoint.lock_folder(out):
        assert runs.train("--resume", out, "steps=7", f"data={text}") == 2
    assert path.read_bytes() == before
    assert (local_folder(out) / "new.csv").exists()


def test_commands_reject_a_bucket_folder_without_a_run(out, capsys):
    for words in (["eval", str(out)], ["sample", str(out)], ["show", str(out)], ["train", "--resume", str(out)]):
        assert main(words) == 2
        assert f"{out} is not a run: the folder does not exist" in capsys.readouterr().err
    for command, status, said in (("plot", 2, "is not a run"), ("inspect", 2, "does not exist")):
        assert main([command, str(out)]) == status
        assert said in capsys.readouterr().err


def test_run_is_converted_from_and_to_a_bucket(out, tmp_path, text, capsys, monkeypatch):
    assert runs.train(*WORDS, f"data={text}", f"out={out}") == 0
    gptj, back = tmp_path / "gptj", out / "back"
    assert main(["convert", str(out), str(gptj), "shards=2"]) == 0
    with monkeypatch.context() as patch:
        before_call(patch, bucket, "_put", lambda path, *_: 1 / (path.name != "tree.pkl"))
        with pytest.raises(ZeroDivisionError):
            main(["convert", str(gptj), str(back)])
    assert set(bucket.list_objects(back)) <= {".lock"}
    assert main(["convert", str(gptj), str(back)]) == 0
    (step,) = checkpoint.list_steps(back)
    found, expected = (arrays(checkpoint.step_folder(place, step)) for place in (back, out))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    capsys.readouterr()
    assert main(["convert", str(gptj), str(back)]) == 2
    assert f"{back} exists; name a folder that does not" in capsys.readouterr().err
    assert main(["convert", str(out), str(out / "gptj")]) == 2
    assert "in a bucket, where only runs are written" in capsys.readouterr().err
