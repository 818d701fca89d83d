"""The bench of checkpoints on a tiny state: what it prints, and that it believes no contender."""

import dataclasses
import gc
import sys

import jax
import numpy as np
import pytest

from shardformer import preset
from shardformer.bench import checkpoint_time, command_line
from shardformer.bench.bench_options import Measuring
from shardformer.bench.checkpoint_time import Contender, Times
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.storage import BucketPath, bucket
from shardformer.training.trainer import Trainer
from tests.surroundings import open_memory_buckets, simulate_free_space

TINY = preset("shakespeare_cpu").replace(vocab=65)
NAMES = ["np.save, np.load", "np.load, device_put", "copy to the host alone", "shardformer"]


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Before each turn the bench collects garbage: here, not among all that the tests before have left."""
    gc.freeze()
    yield
    gc.unfreeze()


def rows(shape):
    lines = checkpoint_time.report(checkpoint_time.sized(TINY.replace(mesh=shape), 2), rounds=1).splitlines()
    assert lines[0].startswith(f"mesh {shape} ")
    return lines[1:]


@pytest.mark.parametrize(("shape", "base"), [("1x1", NAMES[0]), ("4x2", NAMES[1])])
def test_a_row_for_each_and_a_verdict(shape, base, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)  # as where it is not installed
    *found, missing, verdict = rows(shape)
    assert [line[: len(name)] for line, name in zip(found, NAMES, strict=True)] == NAMES
    assert missing == "without Orbax: it is not installed; pip install orbax-checkpoint"
    assert f"x the speed of {base} (" in verdict
    assert "x the copy alone (" in verdict


@pytest.mark.slow
def test_orbax_beside_them():
    assert rows("1x1")[len(NAMES)].startswith("Orbax ")


@pytest.mark.slow
def test_a_bucket_beside_the_disk_is_left_as_it_was(monkeypatch):
    open_memory_buckets(monkeypatch)
    other = BucketPath("gs", "bucket", "runs/other")
    other.write_bytes(b"mine")
    small = checkpoint_time.sized(TINY.replace(mesh="1x1"), 2)
    lines = checkpoint_time.report(small, rounds=1, out="gs://bucket/runs").splitlines()
    assert lines[len(NAMES) + 1].startswith("shardformer, gs://bucket/runs ")
    assert bucket.list_objects(other.parent) == {"other": 4}


def test_a_disk_is_not_named_by_out():
    with pytest.raises(UsageError, match="out=runs/mine is on a disk; out names a bucket"):
        checkpoint_time.bench_checkpoint(Measuring(), TINY.replace(out="runs/mine"))


def test_a_preset_names_no_place_to_save(monkeypatch):
    seen = []
    monkeypatch.setitem(command_line.BENCHES, "checkpoint", lambda options, config: seen.append(config.run.out))
    command_line.main(["checkpoint"])
    command_line.main(["checkpoint", "out=gs://bucket/runs"])
    assert seen == ["", "gs://bucket/runs"]
    with pytest.raises(UsageError, match="seeds and prompt are at least 1; got rounds=15 turn=8 mb=0 seeds=1"):
        command_line.main(["checkpoint", "mb=0"])


@pytest.mark.parametrize("megabytes", [2, 1000])
def test_the_state_has_about_that_size(megabytes):
    c = checkpoint_time.sized(TINY.replace(mesh="4x2"), megabytes)
    leaves = jax.tree.leaves(Trainer(c, mesh.make(c)).abstract)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert nbytes == pytest.approx(megabytes * 1e6, rel=0.2)


def test_a_mesh_without_room_is_refused():
    with pytest.raises(UsageError, match="there are 8 devices"):
        checkpoint_time.report(checkpoint_time.sized(TINY.replace(mesh="8x2", batch=16), 2), rounds=1)


@pytest.mark.parametrize(("disk", "message"), [(0, r"MB of disk, and .* try mb="), (2**60, "MB of memory, and this")])
def test_a_state_larger_than_the_machine_is_rejected(monkeypatch, disk, message):
    """Nothing is allocated or written: mb=99999999999 filled the disk."""
    simulate_free_space(monkeypatch, disk)
    with pytest.raises(UsageError, match=message):
        checkpoint_time.check_room(99_999_999 if disk else 1)


def test_wrong_restored_values_raise():
    c = checkpoint_time.sized(TINY.replace(mesh="1x1"), 2)
    state = checkpoint_time.make_state(Trainer(c, mesh.make(c)).abstract)
    wrong = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), state.host)
    honest = checkpoint_time.shardformer(state)
    assert honest.measure(state).restore > 0
    with pytest.raises(RunError, match="shardformer restored other values"):
        dataclasses.replace(honest, restore=lambda path: wrong).measure(state)


def test_the_verdict_at_its_bars():
    def contender(name, waits, restore):
        return Contender(name, None, times=[Times(1.0, waits, restore)])

    def verdict(ours):
        return checkpoint_time.verdict(ours, contender("raw", 1.0, 1.0), contender("copy", 1.0, np.nan))

    assert verdict(contender("ours", 1.2, 1.25)).count("as wanted") == 2
    assert verdict(contender("ours", 1.21, 1.26)).count("too slow") == 2
