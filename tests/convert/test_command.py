"""`convert` on the command line: runs that go on, and mistakes that are named and leave nothing behind."""

import dataclasses
import errno
import json
import os
import shutil

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.checkpoint import manifest
from shardformer.config import ARCHITECTURE
from shardformer.convert import command, gptj_settings, gptj_state, new_folder, runs, shard_files, stored_arrays
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.run_folder import Run
from tests import runs as command_line
from tests import shared
from tests.convert.conftest import GOLDENS, convert
from tests.convert.test_gptj import bits, filled, on_host
from tests.runs import FAILED, USAGE
from tests.surroundings import before_call, let_fail


def state_of(folder):
    return bits(read(folder))


def read(folder, with_moments=True, step=0):
    with runs.open_state(Run.open(folder), step, with_moments) as state:
        return on_host(state)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert command_line.train("tiny", "mesh=4x2", f"data={text}", "steps=4", "eval_every=2", f"out={out}") == 0
    return out


@pytest.mark.slow
def test_a_run_comes_back_and_goes_on_as_if_it_had_never_left(trained, tmp_path, capsys):
    assert convert(trained, tmp_path / "gptj") == 0
    assert shard_files.count_shards(tmp_path / "gptj") == 8
    assert convert(tmp_path / "gptj", tmp_path / "back") == 0
    assert state_of(tmp_path / "back") == state_of(trained)
    losses = []
    for folder in (trained, tmp_path / "back"):
        shutil.copytree(folder, tmp_path / "on" / folder.name)
        capsys.readouterr()
        assert main(["eval", str(folder), "mesh=4x2"]) == 0
        losses.append(capsys.readouterr().out)
        assert command_line.train("--resume", tmp_path / "on" / folder.name, "mesh=4x2", "steps=6") == 0
    assert losses[0] == losses[1]
    assert state_of(tmp_path / "on" / "back") == state_of(tmp_path / "on" / "run")


@pytest.mark.slow
def test_slim_bfloat16(trained, tmp_path, capsys):
    assert convert(trained, tmp_path / "slim", "shards=2", "dtype=bfloat16", "moments=false") == 0
    assert "in 2 shards, bfloat16, without Adam's moments" in capsys.readouterr().out
    assert convert(tmp_path / "slim", tmp_path / "back") == 0
    assert "Adam's moments start from zero" in capsys.readouterr().out
    full, slim = (read(folder) for folder in (trained, tmp_path / "back"))
    assert slim.step == full.step
    assert slim.moments is None
    assert convert(tmp_path / "slim", tmp_path / "parameters", "moments=false") == 0
    assert bits(read(tmp_path / "parameters", with_moments=False).params) == bits(slim.params)
    rounded = {name: leaf.astype(jax.numpy.bfloat16).astype(np.float32) for name, leaf in full.params.items()}
    assert bits(slim.params) == bits(rounded)
    capsys.readouterr()
    assert convert(tmp_path / "parameters", tmp_path / "again", "shards=2") == 0
    assert "without Adam's moments" in capsys.readouterr().out


def test_a_converted_run_holds_no_optimizer_and_resumes(trained, tmp_path):
    assert convert(trained, tmp_path / "gptj", "moments=false") == 0
    assert convert(tmp_path / "gptj", tmp_path / "run") == 0
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    assert {name.partition("/")[0] for name in manifest.read_manifest(checkpoint).leaves} == {"step", "params"}
    assert command_line.train("--resume", tmp_path / "run", "mesh=4x2", "steps=6") == 0
    zero = read(tmp_path / "run", step=6).moments
    assert zero.steps == 2
    assert read(trained).moments.steps == 4


def test_a_config_that_differs_from_its_checkpoint_is_refused(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"heads": 8', '"heads": 4'))
    assert convert(tmp_path / "run", tmp_path / "gptj", "shards=1") == USAGE
    assert "was trained with heads=8" in capsys.readouterr().err
    assert not (tmp_path / "gptj").exists()


@pytest.mark.slow
def test_a_model_of_gptj_has_token_ids_for_text(recorded, tmp_path, capsys):
    np.random.RandomState(0).randint(0, 32, 2000).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [recorded / "fixed-2", tmp_path / "run", "dtype=float32", "batch=8"]
    assert convert(*words, "steps=2", "remat=none", "warmup=1") == 0
    assert "it has no data yet: give `train --resume` data=..." in capsys.readouterr().out
    run = Run.open(tmp_path / "run")
    assert main(["sample", str(run.out), "prompt=1 2 3", "tokens=5"]) == 0
    sampled = capsys.readouterr().out.split()
    assert sampled[:3] == ["1", "2", "3"]
    assert len(sampled) == 8
    assert main(["sample", str(run.out), "prompt=Hello"]) == USAGE
    assert "this model has token ids without a tokenizer: give numbers in 0..31" in capsys.readouterr().err
    assert main(["eval", str(run.out)]) == USAGE
    assert "this run has no data yet; give data=" in capsys.readouterr().err
    assert command_line.train("--resume", run.out, "mesh=2x1", f"data={tmp_path / 'ids.bin'}") == 0
    assert read(run.out, step=2).moments.steps == 2
    assert Run.open(run.out).fingerprint


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, text):
    """A run with adapters and their average."""
    folder = tmp_path_factory.mktemp("averaged")
    words = ["mesh=1x1", f"data={text}", "steps=3"]
    assert command_line.train("tiny", *words, f"out={folder / 'base'}") == 0
    adapted = [f"base={folder / 'base'}", "ema=0.5", "lora_rank=2", "lr=0.01", f"out={folder / 'run'}"]
    assert command_line.train("tiny", *words, *adapted) == 0
    return folder / "run"


LEFT_OUT = "; the average of the weights is left out (ema=true takes it instead)"


@pytest.mark.slow
def test_adapters_are_merged_last_or_averaged(averaged, tmp_path, capsys):
    found = {}
    for ema in ("false", "true"):
        assert convert(averaged, tmp_path / ema, "merge_lora=true", f"ema={ema}") == 0
        last_line = capsys.readouterr().out
        assert (LEFT_OUT in last_line, "the weights are their average" in last_line) == (ema == "false", ema == "true")
        found[ema] = read(tmp_path / ema, with_moments=False).params["transformer/layers/q"]
    run = Run.open(averaged, {"mesh": "1x1"})
    _, params = run.restore_params(Model.on(run.config, mesh.make(run.config)), averaged=True)
    layers = params["transformer/layers"]
    expected = layers["q"] + run.config.lora.lora_alpha / 2 * (layers["q_lora_in"] @ layers["q_lora_out"])
    np.testing.assert_allclose(found["true"], expected, atol=1e-6)
    assert np.abs(found["false"] - expected).max() > 1e-4


@pytest.mark.slow
def test_the_average_goes_to_gptj_on_request_and_never_unsaid(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert command_line.train("tiny", "mesh=1x1", f"data={text}", "steps=3", "ema=0.5", f"out={out}") == 0
    capsys.readouterr()
    assert convert(out, tmp_path / "last") == 0
    assert "with Adam's moments" + LEFT_OUT in capsys.readouterr().out
    assert convert(out, tmp_path / "averaged", "ema=true") == 0
    assert "without Adam's moments; the weights are their average" in capsys.readouterr().out
    for moments in ("moments=true", "moments=false"):  # neither makes a run that has the average its config tells of
        assert convert(tmp_path / "last", tmp_path / "back", moments) == USAGE
        assert "has no average of the weights to continue from; give ema=0" in capsys.readouterr().err
    assert convert(tmp_path / "last", tmp_path / "back", "ema=0") == 0
    assert state_of(tmp_path / "back") == state_of(out)
    assert convert(tmp_path / "averaged", tmp_path / "back_averaged", "ema=0") == 0
    run = Run.open(out, {"mesh": "1x1"})
    _, params = run.restore_params(Model.on(run.config, mesh.make(run.config)), averaged=True)
    back = read(tmp_path / "back_averaged", with_moments=False).params
    assert bits(back) == bits(runs.flatten(params))


def test_without_a_file_the_words_say_which_model_it_is(recorded, tmp_path):
    folder = shutil.copytree(recorded / "rotary-4", tmp_path / "src")
    config, _ = gptj_settings.read_config(folder / "config.json")
    (folder / "config.json").unlink()
    base = gptj_settings.default_config()
    words = [f"{key}={config.get(key)}" for key in ARCHITECTURE if config.get(key) != base.get(key)]
    assert "heads=8" in words
    assert convert(folder, tmp_path / "told", *words) == 0
    assert convert(recorded / "rotary-4", tmp_path / "read", *words) == 0  # and what agrees with a file may be said
    told, agreed = (read(tmp_path / name, with_moments=False).params for name in ("told", "read"))
    assert bits(told) == bits(agreed)


def test_an_optimizer_that_keeps_something_else(refused, recorded, tmp_path, capsys):
    refused(USAGE, "optimizer=muon has no place for Adam's", recorded / "fixed-2", "optimizer=muon")
    refused(USAGE, "give optimizer=adamw lr_rules=", recorded / "fixed-2", "lr_rules=norm=frozen")
    assert convert(recorded / "rotary-4", tmp_path / "muon", "optimizer=muon") == 0
    capsys.readouterr()
    refused(USAGE, "optimizer=muon does not keep Adam's two moments", tmp_path / "muon", "shards=4")


def test_gptj_6b_is_what_its_own_file_says(tmp_path):
    """The file is mesh-transformer-jax's configs/6B_roto_256.json, as far as it is read."""
    published = {
        "layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "norm": "layernorm", "pe": "rotary",
        "pe_rotary_dims": 64, "seq": 2048, "cores_per_replica": 8, "per_replica_batch": 1,
        "gradient_accumulation_steps": 16, "warmup_steps": 3000, "anneal_steps": 300000, "lr": 1.2e-4, "end_lr": 1.2e-5,
        "weight_decay": 0.1, "total_steps": 350000, "tpu_size": 256,
    }  # fmt: skip
    (tmp_path / "6B_roto_256.json").write_text(json.dumps(published))
    read, count = gptj_settings.read_config(tmp_path / "6B_roto_256.json")
    assert count == 8
    assert read == gptj_settings.default_config().replace(batch=512, decay_steps=303_000)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("config.json, which has block=parallel; leave it out", ["block=sequential"]),
        ("heads=4 contradicts", ["heads=4"]),
        ("config.json, which has heads=8; leave it out, or give config=FILE.json", ["heads=4"]),
        ("positions=none contradicts", ["positions=none"]),
        ("rotary_dims=4 contradicts", ["rotary_dims=4"]),
        ("unknown key 'shard'", ["shard=4"]),
        ("config=nowhere.json cannot be read: No such file", ["config=nowhere.json"]),
        ("the run's folder is DST", ["out=elsewhere"]),
        ("data=nowhere.txt does not exist", ["data=nowhere.txt"]),
        ("train split of builtin: this model has token ids without a tokenizer", ["data=builtin"]),
        ("tokenizer=bytes has 257 entries, and the model predicts 32", ["tokenizer=bytes"]),
        ("tokenizer=chars is made from a text, and there is none", ["tokenizer=chars"]),
        ("the layers of its language model only: give objective=lm, and objective=mtp to", ["objective=mtp"]),
    ],
)
def test_wrong_options(refused, recorded, message, words):
    refused(USAGE, message, recorded / "rotary-4", *words)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("shards=3", ["shards=3"]),
        ("format is one of gptj, hf, peft; got 'h5'", ["format=h5"]),
        ("dtype is one of float32, bfloat16; got 'float16'", ["dtype=float16"]),
        ("shards must be at least 1", ["shards=0"]),
        ("has no checkpoint of step 99", ["step=99"]),
        ("unknown key 'layers'", ["layers=3"]),
        ("weights=nf4 writes another run, and format=hf is not one", ["format=hf", "weights=nf4"]),
    ],
)
def test_wrong_options_for_a_run(refused, trained, message, words):
    refused(USAGE, message, trained, *words)


def test_student_is_converted_without_its_teacher(trained, tmp_path):
    run, folder = Run.open(trained), tmp_path / "student"
    folder.mkdir()
    student = run.config.replace(objective="distill", teacher=f"{tmp_path}/gone", out=str(folder))
    with runs.open_state(run, 0, with_moments=False) as state:
        state = state._replace(params=filled(on_host(state).params))
        runs.write_run(folder, dataclasses.replace(run, config=student), state)
    assert convert(folder, tmp_path / "codes", "weights=int8") == 0


def test_other_targets_are_named_if_none_was_chosen():
    config = shared.tiny(block="sequential")
    with pytest.raises(UsageError, match=r"^block=sequential has no counterpart in GPT-J"):
        command._check_gptj(config, 8, is_named=True)
    with pytest.raises(UsageError, match=r"writes GPT-J's shards, and block=sequential .* other targets are format=hf"):
        command._check_gptj(config, 8, is_named=False)


def test_sources_that_are_none(refused, recorded, tmp_path, trained):
    refused(USAGE, "cannot be converted; expected a run, a Hugging Face folder, PEFT's adapters, GPT-J's", tmp_path)
    refused(USAGE, "does not exist; expected a run", tmp_path / "missing")
    refused(USAGE, f"did you mean {recorded / 'fixed-2'}?", recorded)
    refused(USAGE, "name its run", trained / "step_00000004")
    refused(USAGE, "no native run has", GOLDENS / "seed")
    refused(USAGE, "linear_3/w and 1 more: x + attention + feed-forward is summed over the shards", GOLDENS / "seed")
    refused(USAGE, "Continue it under shardformer.legacy", GOLDENS / "seed")


def test_nothing_is_overwritten(recorded, tmp_path, capsys):
    (tmp_path / "dst").mkdir()
    assert convert(recorded / "rotary-1", tmp_path / "dst") == USAGE
    assert "exists; name a folder that does not" in capsys.readouterr().err
    assert not list((tmp_path / "dst").iterdir())
    assert convert(recorded / "rotary-1") == USAGE
    assert "convert takes SRC DST" in capsys.readouterr().err


def test_a_target_inside_a_file(recorded, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert convert(recorded / "rotary-1", tmp_path / "file" / "deeper" / "dst") == USAGE
    assert f"cannot be made: {tmp_path / 'file'} is a file; name another folder" in capsys.readouterr().err


def test_what_a_killed_conversion_left_goes_with_the_next(recorded, tmp_path, monkeypatch):
    def killed(folder, *_, **__):
        (folder / "shard_0").mkdir()
        (folder / "half").touch()
        raise RunError("killed")

    with monkeypatch.context() as patch:
        before_call(patch, runs, "write_run", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert convert(recorded / "rotary-1", tmp_path / "dst") == FAILED
    assert list(tmp_path.iterdir())
    monkeypatch.setattr(os, "getpid", lambda: 4242424)
    assert convert(recorded / "rotary-1", tmp_path / "dst") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert {path.name for path in (tmp_path / "dst").iterdir()}.isdisjoint({"half", "shard_0"})


def test_two_conversions_to_one_target(recorded, tmp_path, monkeypatch, capsys):
    statuses = []

    def convert_meanwhile(*_, **__):
        statuses.append(convert(recorded / "rotary-1", tmp_path / "dst"))

    before_call(monkeypatch, runs, "write_run", convert_meanwhile)
    assert convert(recorded / "rotary-1", tmp_path / "dst") == 0
    assert statuses == [USAGE]
    assert ".dst.tmp is in use by process" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert Run.open(tmp_path / "dst")


def test_a_target_that_came_while_the_source_was_read(recorded, tmp_path, monkeypatch):
    before_call(monkeypatch, gptj_state, "open_state", lambda *_: (tmp_path / "dst").mkdir())
    assert convert(recorded / "rotary-1", tmp_path / "dst") == USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert not list((tmp_path / "dst").iterdir())


@pytest.mark.parametrize("to_gptj", [False, True])
def test_all_is_on_the_disk_before_it_has_its_name(recorded, trained, tmp_path, monkeypatch, to_gptj):
    target, synced = tmp_path / "dst", {False: [], True: []}
    before_call(monkeypatch, new_folder, "sync", lambda path: synced[target.exists()].append(path))
    assert convert(trained if to_gptj else recorded / "rotary-1", target) == 0
    temporary = min(synced[False])  # the folder of the other files
    assert {path.relative_to(temporary) for path in synced[False] if path != temporary} == {
        path.relative_to(target) for path in target.rglob("*")
    }
    assert synced[True] == [tmp_path]


@pytest.mark.parametrize("same", [np.inf, np.nan])
def test_non_finite_numbers_on_both_sides_hide_no_difference(same):
    a, b = np.array([same, 1, 1], np.float32), np.array([same, 2, 2], np.float32)
    assert stored_arrays.measure_difference(a, b) == (1.0, 1.0)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("3584 requested and 0 written")]
)
@pytest.mark.parametrize("to_gptj", [False, True])
def test_full_disk_names_the_target(recorded, trained, tmp_path, monkeypatch, capsys, error, to_gptj):
    let_fail(monkeypatch, new_folder, "sync", error)
    assert convert(trained if to_gptj else recorded / "rotary-1", tmp_path / "dst") == 1
    assert f"cannot write {tmp_path / 'dst'}: {error.strerror or error}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_linked_folder_in_the_making_is_rejected(refused, recorded, tmp_path):
    (tmp_path / "kept" / "complete").mkdir(parents=True)
    (tmp_path / ".dst.tmp").symlink_to("kept")
    refused(USAGE, ".dst.tmp is a link to kept, and nothing is written or deleted", recorded / "fixed-2")
    assert (tmp_path / "kept" / "complete").exists()
