"""Old checkpoints are deleted, those that are named or set aside are kept, and a link counts as its folder."""

import shutil
from pathlib import Path

import pytest

from shardformer import checkpoint
from shardformer.errors import RunError
from tests.checkpoint.small_saves import disk_full, save, shown, value_of
from tests.surroundings import before_call


def test_list_steps(out):
    assert checkpoint.list_steps(out / "nowhere") == []
    assert checkpoint.newest_step_folder(out) is None
    for step in (100, 20, 123456789):
        save(out, step, step % 7)
    for other in (".step_00000200.tmp-1", "step_00000300.bak", "step_7", "events"):
        if isinstance(out, Path):
            (out / other).mkdir()
        (out / other / "arrays.npy").write_bytes(b"")
    (out / "step_00000400").write_bytes(b"a file")
    assert checkpoint.list_steps(out) == [20, 100, 123456789]
    assert checkpoint.newest_step_folder(out) == checkpoint.step_folder(out, 123456789)


def test_prune_keeps_the_newest_and_the_named(out):
    for step in (10, 20, 30, 40, 50):
        save(out, step, 1)
    checkpoint.prune(out, keep=2, also={20})
    assert shown(out) == ["step_00000020", "step_00000040", "step_00000050"]
    checkpoint.prune(out, keep=9, also=set())
    assert len(checkpoint.list_steps(out)) == 3
    checkpoint.prune(out, keep=1, also=set())
    assert shown(out) == ["step_00000050"]


def test_prune_keeps_the_multiples(out):
    for step in (10, 20, 25, 30, 40, 50):
        save(out, step, 1)
    checkpoint.prune(out, keep=1, also={10}, every=20)
    assert checkpoint.list_steps(out) == [10, 20, 40, 50]


def test_step_can_be_saved_again_after_set_aside(out):
    save(out, 20, 1)
    first = checkpoint.set_aside(out, 20)
    assert checkpoint.list_steps(out) == []
    save(out, 20, 2)
    assert value_of(checkpoint.step_folder(out, 20)) == 2
    assert checkpoint.set_aside(out, 20) != first
    save(out, 20, 3)
    save(out, 30, 4)
    assert first.exists()
    checkpoint.prune(out, keep=1, also=set())
    assert checkpoint.list_steps(out) == [30]
    assert first.exists()
    save(out, 20, 5)
    assert value_of(checkpoint.step_folder(out, 20)) == 5


def test_set_aside_checkpoint_is_not_counted_nor_deleted(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, 1)
    assert checkpoint.set_aside(tmp_path, 30) == tmp_path / "step_00000030.damaged"
    assert checkpoint.list_steps(tmp_path) == [10, 20]
    save(tmp_path, 30, 2)
    assert checkpoint.set_aside(tmp_path, 30).name == "step_00000030.damaged-2"
    save(tmp_path, 30, 3)
    checkpoint.prune(tmp_path, keep=1, also=set())
    assert shown(tmp_path) == ["step_00000030", "step_00000030.damaged", "step_00000030.damaged-2"]
    assert value_of(tmp_path / "step_00000030.damaged-2") == 2


def test_a_prune_that_stops_half_way_shows_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (10, 20):
        save(tmp_path, step, 1)
    with monkeypatch.context() as patch:
        before_call(patch, shutil, "rmtree", lambda path: (next(path.glob("*.npy")).unlink(), disk_full()))
        with pytest.raises(RunError, match=f"cannot delete old checkpoints in {tmp_path}"):
            checkpoint.prune(tmp_path, keep=1, also=set())
    assert checkpoint.list_steps(tmp_path) == [20]
    save(tmp_path, 30, 1)
    assert shown(tmp_path) == ["step_00000020", "step_00000030"]


def test_a_checkpoint_folder_that_is_a_link(tmp_path):
    """Moved to a bigger disk and linked back: it counts, and pruning removes the link alone."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    for step in (10, 20):
        save(run, step, step)
    (run / "step_00000010").rename(disk / "step_00000010")
    (run / "step_00000010").symlink_to(disk / "step_00000010")
    assert checkpoint.list_steps(run) == [10, 20]
    assert value_of(run / "step_00000010") == 10
    checkpoint.prune(run, keep=1, also=set())
    assert shown(run) == ["step_00000020"]
    assert value_of(disk / "step_00000010") == 10
    (run / "step_00000020").rename(disk / "step_00000020")
    (run / "step_00000020").symlink_to(disk / "step_00000020")
    assert checkpoint.set_aside(run, 20).is_symlink()
    save(run, 20, 3)
    assert shown(run) == ["step_00000020", "step_00000020.damaged"]
