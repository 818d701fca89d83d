"""Damaged or misnamed checkpoints of mesh-transformer-jax are rejected with one line."""

import json
import shutil

import numpy as np
import pytest

from shardformer.convert import shard_files
from shardformer.errors import RunError
from tests.runs import FAILED, USAGE


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
        (USAGE, "has 27 arrays per shard; layers=100000", lambda it: edit(it, layers=10**5)),
        (USAGE, "4 shards makes it [16, 32]; give config=", lambda it: edit(it, n_vocab=64)),
        (USAGE, "d_model=32 does not divide into heads=5", lambda it: edit(it, n_heads=5)),
        (USAGE, "has cores_per_replica=8", lambda it: edit(it, cores_per_replica=8)),
        (USAGE, "norm 'rmsnorm' has no counterpart here: it adds its epsilon", lambda it: edit(it, norm="rmsnorm")),
        (USAGE, "each shard has its own norm", lambda it: edit(it, norm="layernorm-desync")),
        (USAGE, "pe is one of rotary, fixed, t5", lambda it: edit(it, pe="alibi")),
        (USAGE, "n_vocab is a whole number", lambda it: edit(it, n_vocab="50400")),
        (USAGE, "it lacks layers, d_model", lambda it: (it / "config.json").write_text("{}")),
        (USAGE, "is not JSON", lambda it: (it / "config.json").write_text("{")),
        (USAGE, "config.json: lr is a number, at least 0; got 'fast'", lambda it: edit(it, lr="fast")),
        (USAGE, "config.json: end_lr is a number, at least 0; got nan", lambda it: edit(it, end_lr=float("nan"))),
        (USAGE, "config.json: weight_decay is a number", lambda it: edit(it, weight_decay=None)),
        (USAGE, "config.json: layers is a whole number, at least 1; got '28'", lambda it: edit(it, layers="28")),
        (USAGE, "config.json: n_heads is a whole number", lambda it: edit(it, n_heads=0)),
        (USAGE, "config.json: seq is a whole number, at least 1; got 0", lambda it: edit(it, seq=0)),
        (USAGE, "config.json: total_steps is a whole number", lambda it: edit(it, total_steps=1.5)),
        (USAGE, "json: warmup_steps is a whole number, at least 0; got -1", lambda it: edit(it, warmup_steps=-1)),
        (USAGE, "config.json: anneal_steps is a whole number", lambda it: edit(it, anneal_steps=True)),
        (USAGE, "config.json: per_replica_batch is a whole number", lambda it: edit(it, per_replica_batch="4")),
        (USAGE, "gradient_accumulation_steps is a whole number", lambda it: edit(it, gradient_accumulation_steps=0)),
        (USAGE, "config.json: pe_rotary_dims is a whole number", lambda it: edit(it, pe_rotary_dims=None)),
        (USAGE, "cores_per_replica=4 is more than tpu_size=2 cores", lambda it: edit(it, tpu_size=2)),
        (USAGE, "config.json must be corrected: vocab must be below 2**31", lambda it: edit(it, n_vocab=2**40)),
        (USAGE, "config.json must be corrected: layers takes", lambda it: edit(it, shardformer={"layers": "4"})),
        (USAGE, "vocab must be at least 1 in a run", lambda it: edit(it, shardformer={"heads": 4})),
        (USAGE, "shardformer is not a configuration of this version", lambda it: edit(it, shardformer=5)),
        (USAGE, "GPT-J has no such norm", lambda it: edit(it, norm=["layernorm"])),
        (USAGE, "pe is one of rotary, fixed, t5, none; got ['rotary']", lambda it: edit(it, pe=["rotary"])),
        (USAGE, "is not a JSON object", lambda it: (it / "config.json").write_text("[]")),
        (USAGE, "is not a configuration of this version", lambda it: edit(it, shardformer={"later": 1})),
    ],
)
def test_a_damaged_or_misnamed_checkpoint_is_refused(refused, folder, status, message, damage):
    damage(folder)
    refused(status, message, folder)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_only_numbered_folders_are_shards(tmp_path):
    for name in ("shard_0", "shard_1", "shard_old", "shard_", "shard_07", "shard_2.bak", "shard_\u0663", "shard_-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "shard_9.txt").touch()
    (tmp_path / "shard_2").touch()
    assert shard_files.count_shards(tmp_path) == 2
    (tmp_path / "shard_999999999999").mkdir()
    with pytest.raises(RunError, match="shard_2 is missing"):
        shard_files.count_shards(tmp_path)
