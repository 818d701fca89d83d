"""`convert` on the command line: runs that go on, and mistakes that are named and leave nothing behind."""

import json
import shutil

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import runs, settings, shards, tokens
from shardformer.run import Run
from tests import runs as command_line
from tests.convert.conftest import GOLDENS
from tests.convert.test_gptj import bits

USAGE, FAILED = 2, 1


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def state_of(folder):
    return bits(runs.read(Run.open(folder), 0, with_moments=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert (
        command_line.train("tiny", "mesh=2x1", f"data={text}", "steps=4", "eval_every=2", "seed=3", f"out={out}") == 0
    )
    return out


def test_a_run_comes_back_and_goes_on_as_if_it_had_never_left(trained, tmp_path, capsys):
    assert convert(trained, tmp_path / "gptj") == 0
    assert shards.count(tmp_path / "gptj") == 8
    assert convert(tmp_path / "gptj", tmp_path / "back") == 0
    assert state_of(tmp_path / "back") == state_of(trained)
    losses = []
    for folder in (trained, tmp_path / "back"):
        shutil.copytree(folder, tmp_path / "on" / folder.name)
        capsys.readouterr()
        assert main(["eval", str(folder), "mesh=2x1"]) == 0
        losses.append(capsys.readouterr().out)
        assert command_line.train("--resume", tmp_path / "on" / folder.name, "mesh=2x1", "steps=6") == 0
    assert losses[0] == losses[1]
    assert state_of(tmp_path / "on" / "back") == state_of(tmp_path / "on" / "run")


def test_slim_bfloat16(trained, tmp_path, capsys):
    assert convert(trained, tmp_path / "slim", "shards=2", "dtype=bfloat16", "moments=false") == 0
    assert "in 2 shards, bfloat16, without Adam's moments" in capsys.readouterr().out
    assert convert(tmp_path / "slim", tmp_path / "back") == 0
    assert "Adam's moments begin anew" in capsys.readouterr().out
    full, slim = (runs.read(Run.open(folder), 0, with_moments=True) for folder in (trained, tmp_path / "back"))
    assert slim.step == full.step
    assert slim.moments.count == 0
    assert convert(tmp_path / "slim", tmp_path / "parameters", "moments=false") == 0
    assert bits(runs.read(Run.open(tmp_path / "parameters"), 0, with_moments=False).params) == bits(slim.params)
    rounded = {name: leaf.astype(jax.numpy.bfloat16).astype(np.float32) for name, leaf in full.params.items()}
    assert bits(slim.params) == bits(rounded)


def test_a_model_of_gptj_has_token_ids_for_characters(recorded, tmp_path, capsys):
    text = tokens.text(np.random.RandomState(0).randint(0, 32, 2000))
    (tmp_path / "ids.txt").write_text(text, encoding="utf-8")
    words = [recorded / "fixed-2", tmp_path / "run", f"data={tmp_path / 'ids.txt'}", "dtype=float32", "batch=8"]
    assert convert(*words, "steps=2", "remat=false", "warmup=1") == 0
    capsys.readouterr()
    run = Run.open(tmp_path / "run")
    prompt = tokens.text([1, 2, 3])
    assert main(["sample", str(run.out), f"prompt={prompt}", "tokens=5"]) == 0
    sampled = tokens.ids(capsys.readouterr().out.strip())
    assert sampled[:3] == [1, 2, 3]
    assert len(sampled) == 8
    assert main(["sample", str(run.out), "prompt=Hello"]) == USAGE
    assert "character 'H' (U+0048)" in capsys.readouterr().err
    assert command_line.train("--resume", run.out, "mesh=2x1") == 0
    assert runs.read(run, 2, with_moments=True).moments.count == 2


def test_token_ids_are_characters_that_nobody_types():
    ids = [0, 1, 50399, 65533, 65534, tokens.MOST - 1]
    assert tokens.ids(tokens.text(ids)) == ids
    assert len(tokens.vocabulary(50400)) == 50400
    assert list(tokens.vocabulary(65600).encode(tokens.text([65533, 65534]))) == [65533, 65534]
    with pytest.raises(ValueError, match=r"U\+0041 stands for no token id"):
        tokens.ids("A")
    with pytest.raises(ValueError, match="got 131068"):
        tokens.text([131068])


def test_gptj_6b_is_what_its_own_file_says(tmp_path):
    """The file is mesh-transformer-jax's configs/6B_roto_256.json, as far as it is read."""
    published = {
        "layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "norm": "layernorm", "pe": "rotary",
        "pe_rotary_dims": 64, "seq": 2048, "cores_per_replica": 8, "per_replica_batch": 1,
        "gradient_accumulation_steps": 16, "warmup_steps": 3000, "anneal_steps": 300000, "lr": 1.2e-4, "end_lr": 1.2e-5,
        "weight_decay": 0.1, "total_steps": 350000, "tpu_size": 256,
    }  # fmt: skip
    (tmp_path / "6B_roto_256.json").write_text(json.dumps(published))
    read, count = settings.read(tmp_path / "6B_roto_256.json")
    assert count == 8
    assert read == settings.base().replace(batch=512, decay_steps=303_000)


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


@pytest.fixture
def folder(recorded, tmp_path):
    """Four shards that may be damaged."""
    return shutil.copytree(recorded / "rotary-4", tmp_path / "src")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def replace(path, *arrays):
    np.savez(path, *arrays)


@pytest.mark.parametrize(
    ("status", "message", "damage"),
    [
        (FAILED, "shard_2 is missing", lambda it: shutil.rmtree(it / "shard_2")),
        (USAGE, "has 3 shards, and", lambda it: shutil.rmtree(it / "shard_3")),
        (FAILED, "shard_1/7.npz is missing", lambda it: (it / "shard_1" / "7.npz").unlink()),
        (FAILED, "shard_1/7.npz is damaged", lambda it: (it / "shard_1" / "7.npz").write_bytes(b"")),
        (FAILED, "shard_3/0.npz is damaged", lambda it: shutil.copy(it / "config.json", it / "shard_3" / "0.npz")),
        (FAILED, "shard_0/15.npz is damaged", lambda it: _truncate(it / "shard_0" / "15.npz")),
        (FAILED, "shard_2/2.npz is damaged", lambda it: flip(it / "shard_2" / "2.npz")),
        (
            FAILED,
            "linear_4/b is object, expected",
            lambda it: replace(it / "shard_1" / "3.npz", *[np.full(32, None)] * 2),
        ),
        (FAILED, "shard_1 has 28 arrays where shard_0 has 27", lambda it: replace(it / "shard_1" / "0.npz", *[0] * 3)),
        (USAGE, "shard_0/0.npz: params/causal", lambda it: replace(it / "shard_0" / "0.npz", np.zeros(3), np.zeros(3))),
        (USAGE, "has 27 arrays per shard; layers=3", lambda it: edit(it, layers=3)),
        (USAGE, "4 shards makes it [16, 32]; give config=", lambda it: edit(it, n_vocab=64)),
        (USAGE, "d_model=32 does not divide into heads=5", lambda it: edit(it, n_heads=5)),
        (USAGE, "says cores_per_replica=8", lambda it: edit(it, cores_per_replica=8)),
        (USAGE, "norm 'rmsnorm' has no counterpart here: it adds its epsilon", lambda it: edit(it, norm="rmsnorm")),
        (USAGE, "every shard has a norm of its own", lambda it: edit(it, norm="layernorm-desync")),
        (USAGE, "pe is one of rotary, fixed, t5", lambda it: edit(it, pe="alibi")),
        (USAGE, "n_vocab is a whole number", lambda it: edit(it, n_vocab="50400")),
        (USAGE, "it has no layers, d_model", lambda it: (it / "config.json").write_text("{}")),
        (USAGE, "is no JSON", lambda it: (it / "config.json").write_text("{")),
        (USAGE, "holds no object", lambda it: (it / "config.json").write_text("[]")),
        (USAGE, "is no configuration of this version", lambda it: edit(it, shardformer={"later": 1})),
    ],
)
def test_a_damaged_or_misnamed_checkpoint_is_refused(refused, folder, status, message, damage):
    damage(folder)
    refused(status, message, folder)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("block=sequential has no counterpart in GPT-J", ["block=sequential"]),
        ("unknown key 'shard'", ["shard=4"]),
        ("config=nowhere.json cannot be read: No such file", ["config=nowhere.json"]),
        ("the run's folder is DST", ["out=elsewhere"]),
        ("data=nowhere.txt: there is no such file", ["data=nowhere.txt"]),
        ("train split of builtin: character 'T' (U+0054)", ["data=builtin"]),
    ],
)
def test_wrong_options(refused, recorded, message, words):
    refused(USAGE, message, recorded / "rotary-4", *words)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("shards=3", ["shards=3"]),
        ("format is one of gptj; got 'hf'", ["format=hf"]),
        ("dtype is one of float32, bfloat16; got 'float16'", ["dtype=float16"]),
        ("shards must be at least 1", ["shards=0"]),
        ("has no checkpoint of step 99", ["step=99"]),
        ("unknown key 'layers'", ["layers=3"]),
    ],
)
def test_wrong_options_for_a_run(refused, trained, message, words):
    refused(USAGE, message, trained, *words)


def test_sources_that_are_none(refused, recorded, tmp_path, trained):
    refused(USAGE, "is neither a run, nor a checkpoint of GPT-J", tmp_path)
    refused(USAGE, f"did you mean {recorded / 'fixed-2'}?", recorded)
    refused(USAGE, "name its run", trained / "step_00000004")
    refused(USAGE, "no native run has", GOLDENS / "seed")
    refused(USAGE, "linear_3/w and 1 more: x + attention + feed-forward is summed over the shards", GOLDENS / "seed")
    refused(USAGE, "It goes on as it is under shardformer.legacy", GOLDENS / "seed")


def test_nothing_is_overwritten(recorded, tmp_path, capsys):
    (tmp_path / "dst").mkdir()
    assert convert(recorded / "rotary-1", tmp_path / "dst") == USAGE
    assert "exists; name a folder that does not" in capsys.readouterr().err
    assert not list((tmp_path / "dst").iterdir())
    assert convert(recorded / "rotary-1") == USAGE
    assert "convert takes SRC DST" in capsys.readouterr().err
