"""A save that fails or is killed anywhere leaves the older checkpoints, whole, and no half one."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from shardformer import checkpoint
from shardformer.errors import RunError

ROOT = Path(__file__).parents[2]
MANY = 2**18  # floats: one MiB


def save(out, step, value, size=4):
    return checkpoint.save(out, step, {"x": jnp.full(size, value, jnp.float32)}, {"progress.json": f"{value}"})


def value_of(folder, size=4):
    here = SingleDeviceSharding(jax.devices()[0])
    (x,) = jax.tree.leaves(checkpoint.restore(folder, {"x": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here)}))
    assert checkpoint.document(folder, "progress.json") == f"{int(x[0])}"
    return int(x[0])


def shown(out):
    return sorted(path.name for path in out.iterdir())


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_steps_and_latest(tmp_path):
    assert checkpoint.steps(tmp_path / "nowhere") == []
    assert checkpoint.latest(tmp_path) is None
    for step in (100, 20, 123456789):
        save(tmp_path, step, step % 7)
    for other in (".step_00000200.tmp-1", "step_00000300.bak", "step_7", "events"):
        (tmp_path / other).mkdir()
    (tmp_path / "step_00000400").write_text("a file")
    assert checkpoint.steps(tmp_path) == [20, 100, 123456789]
    assert checkpoint.latest(tmp_path) == checkpoint.folder(tmp_path, 123456789)


@pytest.mark.parametrize(
    "call", ["os.rename", "os.fsync", "pickle.dump", "pathlib.Path.write_text", "pathlib.Path.mkdir"]
)
@pytest.mark.parametrize("step", [20, 40], ids=["same step", "new step"])
def test_a_failing_call_loses_nothing(tmp_path, monkeypatch, call, step):
    save(tmp_path, 20, 1)
    with monkeypatch.context() as patch:
        patch.setattr(call, disk_full)
        with pytest.raises(RunError, match=f"{checkpoint.folder(tmp_path, step)}.*No space left on device.*intact"):
            save(tmp_path, step, 2)
    assert shown(tmp_path) == ["step_00000020"]
    assert value_of(checkpoint.latest(tmp_path)) == 1


def test_a_file_that_the_disk_has_no_room_for(tmp_path):
    save(tmp_path, 20, 1, MANY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MANY, limits[1]))
    try:
        with pytest.raises(RunError, match="File too large"):
            save(tmp_path, 40, 2, MANY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shown(tmp_path) == ["step_00000020"]
    assert value_of(checkpoint.latest(tmp_path), MANY) == 1


def test_the_second_rename_of_a_replacement_fails(tmp_path, monkeypatch):
    save(tmp_path, 20, 1)
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda a, b: disk_full() if ".tmp-" in str(a) else rename(a, b))
        with pytest.raises(RunError, match="No space left"):
            save(tmp_path, 20, 2)
    assert shown(tmp_path) == ["step_00000020"]
    assert value_of(checkpoint.latest(tmp_path)) == 1


def test_a_replacement_replaces(tmp_path):
    save(tmp_path, 20, 1)
    save(tmp_path, 20, 2)
    assert shown(tmp_path) == ["step_00000020"]
    assert value_of(checkpoint.latest(tmp_path)) == 2


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run/step_00000001.*Not a directory"):
        save(tmp_path / "file" / "run", 1, 1)


def test_an_interrupt_is_passed_on_and_cleaned_up_after(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, 1)
    assert shown(tmp_path) == []


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from shardformer import checkpoint

out, step, renames = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def save(step, value):
    checkpoint.save(out, step, {"x": jnp.full(4, value, jnp.float32)}, {"progress.json": f"{value}"})

save(20, 1)
rename = os.rename

def rename_until_killed(*names):
    global renames
    if renames == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    renames -= 1
    rename(*names)

os.rename = rename_until_killed
save(step, 2)
"""


@pytest.mark.parametrize(("step", "renames"), [(40, 0), (20, 1)], ids=["before the rename", "between the two renames"])
def test_a_kill_leaves_the_older_one(tmp_path, step, renames):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(step), str(renames)],
                         env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert any(name.startswith(".step_") for name in shown(tmp_path))
    assert checkpoint.steps(tmp_path) == [20]
    assert value_of(checkpoint.latest(tmp_path)) == 1
    save(tmp_path, 60, 3)
    assert shown(tmp_path) == ["step_00000020", "step_00000060"]


def test_a_living_process_keeps_its_temporary_folder(tmp_path):
    living, own, gone = (f".step_00000040.tmp-{pid}" for pid in (os.getppid(), os.getpid(), 999999999))
    for name in (living, own, gone):
        (tmp_path / name).mkdir()
    save(tmp_path, 20, 1)
    assert shown(tmp_path) == [living, "step_00000020"]


def test_prune_keeps_the_newest_and_the_named(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, 1)
    checkpoint.prune(tmp_path, keep=2, also={20})
    assert shown(tmp_path) == ["step_00000020", "step_00000040", "step_00000050"]
    checkpoint.prune(tmp_path, keep=9, also=set())
    assert len(checkpoint.steps(tmp_path)) == 3
    checkpoint.prune(tmp_path, keep=1, also=set())
    assert shown(tmp_path) == ["step_00000050"]


def test_a_prune_that_stops_half_way_shows_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (10, 20):
        save(tmp_path, step, 1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (next(path.glob("*.npy")).unlink(), disk_full()))
        with pytest.raises(RunError, match=f"cannot delete old checkpoints in {tmp_path}"):
            checkpoint.prune(tmp_path, keep=1, also=set())
    assert checkpoint.steps(tmp_path) == [20]
    save(tmp_path, 30, 1)
    assert shown(tmp_path) == ["step_00000020", "step_00000030"]


def test_files_and_folders_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr("os.fsync", lambda file: (events.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr("os.rename", lambda *names: (events.append("rename"), rename(*names)))
    folder = save(tmp_path, 20, 1)
    *files, written, renamed, parent = events
    assert sorted(files) == sorted(path.stat().st_ino for path in folder.iterdir())
    assert (written, renamed, parent) == (folder.stat().st_ino, "rename", tmp_path.stat().st_ino)
