"""A save that fails or is killed anywhere leaves the older checkpoints intact and no partial one visible."""

import errno
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardformer import checkpoint, files
from shardformer.checkpoint import documents, manifest, safe_pickle
from shardformer.devices import processes
from shardformer.errors import RunError
from tests.checkpoint.small_saves import disk_full, save, shown, value_of
from tests.surroundings import before_call, before_sync, let_fail

ROOT = Path(__file__).parents[2]
MANY = 2**18  # floats: one MiB


CALLS = (
    "os.mkdir",
    "os.open",
    "os.fsync",
    "os.rename",
    "io.open",
    "pathlib.Path.write_bytes",
    "pathlib.Path.write_text",
)


def fail_at(patch, number: int, error: OSError) -> list:
    """Makes one call of all these functions fail, chosen by its number, and every later call of the same name."""
    made, broken = [], []

    def failing(name, function):
        def call(*arguments, **named):
            made.append(name)
            if len(made) == number:
                broken.append(name)
            if name in broken:
                raise error
            return function(*arguments, **named)

        return call

    for name in CALLS:
        owner, _, attribute = name.rpartition(".")
        owner = {"os": os, "io": io, "pathlib.Path": Path}[owner]
        patch.setattr(owner, attribute, failing(name, getattr(owner, attribute)))
    return made


FAILURES = {
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "permission denied": PermissionError(errno.EACCES, "Permission denied"),
    "bad disk": OSError(errno.EIO, "Input/output error"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_at_any_point_of_a_save_loses_nothing(tmp_path, monkeypatch, failure):
    save(tmp_path, 20, 1)
    with monkeypatch.context() as patch:
        count = len((made := fail_at(patch, 0, OSError()), save(tmp_path, 30, 1))[0])
        assert {"os.mkdir", "os.fsync", "os.rename", "pathlib.Path.write_bytes"} <= set(made)
    for number in range(1, count + 1):
        with monkeypatch.context() as patch:
            made = fail_at(patch, number, FAILURES[failure])
            with pytest.raises(RunError, match=f"step_00000040.*{failure_text(failure)}.*intact"):
                save(tmp_path, 40, 2)
        assert checkpoint.list_steps(tmp_path) == [20, 30], made[number - 1]
        assert value_of(checkpoint.newest_step_folder(tmp_path)) == 1
        assert not [name for name in shown(tmp_path) if "damaged" in name]
    save(tmp_path, 40, 2)
    assert shown(tmp_path) == ["step_00000020", "step_00000030", "step_00000040"]


def failure_text(failure: str) -> str:
    return FAILURES[failure].strerror


@pytest.mark.parametrize("room", [0, 20, 100, 140, 300])
def test_full_disk_loses_nothing_at_any_size(tmp_path, room):
    """A real short write, somewhere in each of the files."""
    save(tmp_path, 20, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(RunError, match=r"step_00000040: .*File too large; the older ones are intact"):
            save(tmp_path, 40, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shown(tmp_path) == ["step_00000020"]
    assert value_of(checkpoint.newest_step_folder(tmp_path)) == 1


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
    assert value_of(checkpoint.newest_step_folder(tmp_path), MANY) == 1


def test_existing_checkpoint_is_never_replaced(out):
    save(out, 20, 1)
    with pytest.raises(RunError, match=r"step_00000020: .*(not empty|exists already)"):
        save(out, 20, 2)
    assert shown(out) == ["step_00000020"]
    assert value_of(checkpoint.newest_step_folder(out)) == 1


def test_a_folder_that_may_only_be_read(tmp_path, monkeypatch):
    """Simulates the system's error for every call that makes a file, as root may write anywhere."""
    save(tmp_path, 20, 1)
    with monkeypatch.context() as patch:
        let_fail(patch, os, "mkdir", OSError(errno.EROFS, "Read-only file system"))
        with pytest.raises(RunError, match=r"step_00000040: .*Read-only file system"):
            save(tmp_path, 40, 2)
        assert value_of(checkpoint.newest_step_folder(tmp_path)) == 1


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write in .*file/run: .*Not a directory"):
        save(tmp_path / "file" / "run", 1, 1)


def test_an_interrupt_is_passed_on_and_cleaned_up_after(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before_sync(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, 1)
    assert shown(tmp_path) == []


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from shardformer import checkpoint

out = sys.argv[1]

def save(step, value):
    checkpoint.save(out, step, {"x": jnp.full(4, value, jnp.float32)}, {"progress.json": f"{value}"})

save(20, 1)
os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
save(40, 2)
"""


@pytest.mark.multiprocess
def test_a_kill_leaves_the_older_one(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)],
                         env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert any(name.startswith(".step_") for name in shown(tmp_path))
    assert checkpoint.list_steps(tmp_path) == [20]
    assert value_of(checkpoint.newest_step_folder(tmp_path)) == 1
    save(tmp_path, 60, 3)
    assert shown(tmp_path) == ["step_00000020", "step_00000060"]


def make_file(path: Path) -> None:
    path.write_text("stray")


def make_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_link_to_folder(path: Path) -> None:
    (path.parents[1] / "elsewhere").mkdir()
    (path.parents[1] / "elsewhere" / "file").touch()
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.parametrize("make", [make_file, make_link, make_link_to_folder, os.mkfifo])
def test_stray_temporary_entry_does_not_block_saves(tmp_path, make):
    run = tmp_path / "run"
    run.mkdir()
    make(run / ".step_00000007.tmp-deadbeef")
    save(run, 20, 1)
    assert shown(run) == ["step_00000020"]
    if make is make_link_to_folder:
        assert (tmp_path / "elsewhere" / "file").exists()


@pytest.mark.parametrize("make", [make_file, make_link, os.mkfifo])
def test_stray_entry_with_a_step_name_does_not_block_saves(tmp_path, make):
    make(tmp_path / "step_00000020")
    assert checkpoint.list_steps(tmp_path) == []
    save(tmp_path, 20, 1)
    assert value_of(tmp_path / "step_00000020") == 1
    assert shown(tmp_path) == ["step_00000020", "step_00000020.damaged"]


def test_undeletable_leftovers_do_not_block_saves(tmp_path, monkeypatch):
    (tmp_path / ".step_00000007.tmp-1").mkdir()
    before_call(monkeypatch, shutil, "rmtree", disk_full)
    save(tmp_path, 20, 1)
    assert checkpoint.list_steps(tmp_path) == [20]


def test_files_and_folders_are_synced_around_the_rename(tmp_path, monkeypatch):
    events = []
    before_sync(monkeypatch, lambda file: events.append(os.fstat(file).st_ino))
    before_call(monkeypatch, os, "rename", lambda *_: events.append("rename"))
    folder = save(tmp_path, 20, 1)
    *files, written, renamed, parent = events
    assert set(files) == {path.stat().st_ino for path in folder.iterdir()}
    assert (written, renamed, parent) == (folder.stat().st_ino, "rename", tmp_path.stat().st_ino)


def test_folders_made_by_a_save_are_synced(tmp_path, monkeypatch):
    synced = []
    before_sync(monkeypatch, lambda file: synced.append(os.fstat(file).st_ino))
    save(tmp_path / "runs" / "run", 20, 1)
    assert {tmp_path.stat().st_ino, (tmp_path / "runs").stat().st_ino} <= set(synced)


def test_replaced_file_and_its_folder_are_synced(tmp_path, monkeypatch):
    events = []
    before_sync(monkeypatch, lambda file: events.append(os.fstat(file).st_ino))
    before_call(monkeypatch, os, "replace", lambda *_: events.append("replace"))
    with files.replacing(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert events == [(tmp_path / "file").stat().st_ino, "replace", tmp_path.stat().st_ino]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync(tmp_path, monkeypatch, refusal):
    before_sync(monkeypatch, lambda file: (_ for _ in ()).throw(OSError(refusal, "no such call here")))
    assert value_of(save(tmp_path / "run", 20, 1)) == 1


@pytest.mark.parametrize("name", ["tree.pkl", "manifest.json", "progress.json"])
def test_oversized_small_file_is_not_written(tmp_path, monkeypatch, name):
    save(tmp_path, 20, 1)
    assert documents._MAX_BYTES == {"tree.pkl": safe_pickle.MAX_BYTES, "manifest.json": manifest.MAX_BYTES}
    monkeypatch.setitem(documents._MAX_BYTES, name, 10)
    with pytest.raises(RunError, match=rf"step_00000040: its {name} would have \d+ bytes, more than the limit of 10"):
        save(tmp_path, 40, 12345678901)
    assert shown(tmp_path) == ["step_00000020"]


def test_part_written_after_a_failure_is_removed(tmp_path, monkeypatch):
    """Process 1 makes the folder again after process 0 removed it; process 0 removes it again when all have ended."""

    def write_late(_):
        (tmp_path / ".step_00000040.tmp-1234abcd").mkdir()

    before_call(monkeypatch, processes, "first_message_from_any_process", write_late)
    before_sync(monkeypatch, disk_full)
    with pytest.raises(RunError, match="No space left"):
        save(tmp_path, 40, 1)
    assert shown(tmp_path) == []


def restore_points(patch, number: int, failure: OSError):
    """Makes one open or read of a restore fail, chosen by its number among all of them."""
    made = []

    def failing(function):
        def call(*arguments, **named):
            made.append(function)
            if len(made) == number:
                raise failure
            return function(*arguments, **named)

        return call

    for name in ("open", "fdopen", "fstat", "pread", "preadv"):
        patch.setattr(os, name, failing(getattr(os, name)))
    return made


def test_failed_restore_names_the_file(tmp_path, monkeypatch):
    folder = save(tmp_path, 20, 1)
    with monkeypatch.context() as patch:
        count = len((restore_points(patch, 0, OSError()), value_of(folder))[0])
    assert count > 10
    for number in range(1, count + 1):
        with monkeypatch.context() as patch:
            restore_points(patch, number, OSError(errno.EIO, "Input/output error"))
            with pytest.raises(RunError, match=rf"{folder}/\S+ cannot be read.*Input/output error"):
                value_of(folder)
    assert value_of(folder) == 1


def test_short_reads_are_continued(tmp_path, monkeypatch):
    folder, preadv = save(tmp_path, 20, 1, MANY), os.preadv
    monkeypatch.setattr("os.preadv", lambda file, views, offset: preadv(file, [views[0][:1000]], offset))
    assert value_of(folder, MANY) == 1


def test_publishing_without_the_lock_shows_nothing(tmp_path):
    """The run loses its folder after the files were written, just before the rename."""

    class LostLock:
        calls = 0

        def renew(self):
            self.calls += 1
            if self.calls == 2:  # the saver asks first
                raise checkpoint.FolderLost("taken over")

    with pytest.raises(RunError, match="taken over"):
        checkpoint.save(tmp_path, 40, {"x": jnp.zeros(4)}, {}, LostLock())
    assert checkpoint.list_steps(tmp_path) == []
