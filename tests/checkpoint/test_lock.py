"""One run in a folder, whatever became of the one before it."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardformer import checkpoint
from shardformer.checkpoint import lock
from shardformer.checkpoint.lock_owner import Owner, is_known_dead, this_process
from shardformer.checkpoint.store import LockTimes
from shardformer.errors import RunError, UsageError
from tests.surroundings import let_fail
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
HOLDS = """
import sys, time
from shardformer import checkpoint

with checkpoint.lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(out: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(out)], env=environment, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.mark.multiprocess
def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    out = tmp_path / "run"
    first = hold(out)
    try:
        with (
            pytest.raises(UsageError, match=rf"{out} is in use by process {first.pid} on {socket.gethostname()}; stop"),
            checkpoint.lock_folder(out),
        ):
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (out / ".lock").exists()  # the killed one left it, and it is known to be stale
    with checkpoint.lock_folder(out):
        assert json.loads((out / ".lock").read_text())["process"] == os.getpid()
    assert list(out.iterdir()) == []


def test_within_one_process(tmp_path):
    with (
        checkpoint.lock_folder(tmp_path),
        pytest.raises(UsageError, match="is in use"),
        checkpoint.lock_folder(tmp_path),
    ):
        pass
    with checkpoint.lock_folder(tmp_path):
        pass


def test_unrenewed_lock_of_another_machine_is_stale(tmp_path):
    """Another machine's lock may not be seen here."""
    path = tmp_path / ".lock"
    path.write_text('{"host": "elsewhere", "process": 12}')
    with (
        pytest.raises(UsageError, match=rf"in use by process 12 on elsewhere \d+ s ago; .*wait 120 s or delete {path}"),
        checkpoint.lock_folder(tmp_path),
    ):
        pass
    assert json.loads(path.read_text())["host"] == "elsewhere"
    long_ago = time.time() - lock.TIMES.expire - 1
    os.utime(path, (long_ago, long_ago))
    with checkpoint.lock_folder(tmp_path):
        assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_lock_age_uses_the_clock_of_the_file_system(tmp_path, monkeypatch):
    """This machine's may be minutes ahead of it, and the run elsewhere is alive all the same."""
    (tmp_path / ".lock").write_text('{"host": "elsewhere", "process": 12}')
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * lock.TIMES.expire)
    with (
        pytest.raises(UsageError, match=r"was in use by process 12 on elsewhere \d\d? s ago"),
        checkpoint.lock_folder(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_lock_dated_in_the_future_becomes_stale(tmp_path):
    """Its machine's clock was wrong: the wait that the message asks for must end."""
    path = tmp_path / ".lock"
    path.write_text('{"host": "elsewhere", "process": 12}')
    os.utime(path, (time.time() + 10**6,) * 2)
    with (
        pytest.raises(UsageError, match="was in use by process 12 on elsewhere 0 s ago"),
        checkpoint.lock_folder(tmp_path),
    ):
        pass
    assert path.stat().st_mtime <= time.time() + 1
    before = time.time() - lock.TIMES.expire - 1
    os.utime(path, (before, before))  # as the promised time later
    with checkpoint.lock_folder(tmp_path):
        pass


def test_a_folder_that_moves_is_noticed_and_found(tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "moved"
    with checkpoint.lock_folder(out) as held:
        held.check_still_locked()
        out.rename(elsewhere)
        with pytest.raises(checkpoint.FolderLost, match=f"was moved to {elsewhere} while") as lost:
            held.check_still_locked()
        assert lost.value.moved_to == elsewhere
        out.mkdir()  # another folder of that name changes nothing
        with pytest.raises(checkpoint.FolderLost, match="was moved"):
            held.check_still_locked()
        (elsewhere / "config.json").touch()
    assert [path.name for path in elsewhere.iterdir()] == ["config.json"]  # the lock went, so that it can be resumed


def test_a_folder_that_is_deleted_is_noticed(tmp_path):
    out = tmp_path / "run"
    with checkpoint.lock_folder(out) as held:
        shutil.rmtree(out)
        for _ in range(2):
            with pytest.raises(checkpoint.FolderLost, match=f"{out} was deleted") as lost:
                held.check_still_locked()
            assert lost.value.moved_to is None
            out.mkdir(exist_ok=True)
    assert list(out.iterdir()) == []


def test_a_folder_that_another_run_took_over_is_noticed(tmp_path):
    with checkpoint.lock_folder(tmp_path) as first:
        (tmp_path / ".lock").unlink()
        first.check_still_locked()  # nobody came yet
        with checkpoint.lock_folder(tmp_path) as second:
            with pytest.raises(checkpoint.FolderLost, match="another run has locked"):
                first.check_still_locked()
            second.check_still_locked()


def test_a_link_to_the_folder_is_the_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with checkpoint.lock_folder(tmp_path / "run") as held:
        held.check_still_locked()


def test_ending_run_keeps_a_later_runs_lock(tmp_path):
    """Somebody removed the lock of the first, and a second came."""
    with contextlib.ExitStack() as second:
        with checkpoint.lock_folder(tmp_path):
            (tmp_path / ".lock").unlink()
            second.enter_context(checkpoint.lock_folder(tmp_path))
        with pytest.raises(UsageError, match="is in use"), checkpoint.lock_folder(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/run"])
def test_a_folder_that_cannot_be_made(out):
    with (
        pytest.raises(RunError, match=f"cannot write in {out}: .*give another folder as out="),
        checkpoint.lock_folder(out),
    ):
        pass


def test_living_run_renews_its_lock(tmp_path):
    with checkpoint.lock_folder(tmp_path, lock.TIMES._replace(renew=0.01)):
        path = tmp_path / ".lock"
        os.utime(path, (0, 0))
        wait_for(lambda: path.stat().st_mtime > 0)


@pytest.fixture
def without_locks(monkeypatch):
    let_fail(monkeypatch, fcntl, "flock", OSError("no locks available"))


def test_a_file_system_without_locks(tmp_path, without_locks):
    with checkpoint.lock_folder(tmp_path):
        pass
    here = this_process()
    again = here._replace(started=here.started - 1)  # the system has used this process's number before
    owners = (Owner("elsewhere", 12), False), (here, False), (here._replace(process=999999999), True), (again, True)
    for owner, dead in owners:
        (tmp_path / ".lock").write_text(json.dumps(owner._asdict()))
        in_use = contextlib.nullcontext() if dead else pytest.raises(UsageError, match=f"use by {owner}")
        with in_use, checkpoint.lock_folder(tmp_path):
            pass


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": ""}])
@pytest.mark.parametrize("lives", [True, False])
def test_lock_of_an_invisible_run_of_this_host_name(tmp_path, without_locks, changed, lives):
    """Another machine or container may have this host name, on a file system that hides its lock."""
    path = tmp_path / ".lock"
    path.write_text(json.dumps(this_process()._replace(process=999999999, **changed)._asdict()))
    start = time.monotonic()
    with (
        renewing(path) if lives else contextlib.nullcontext(),
        pytest.raises(UsageError, match="is in use by process 999999999") if lives else contextlib.nullcontext(),
        checkpoint.lock_folder(tmp_path, LockTimes(renew=20, expire=PATIENCE if lives else 1, watch=0.05)),
    ):
        assert time.monotonic() - start > 0.9


@contextlib.contextmanager
def renewing(path: Path):
    """Renews a lock within the block."""
    ended = threading.Event()

    def renew():
        while not ended.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_local_lock_of_a_dead_container_is_taken_at_once(tmp_path):
    """The negative twin: one kernel, whose lock would be seen."""
    path = tmp_path / ".lock"
    path.write_text(json.dumps(this_process()._replace(process=1, namespace="pid:[1]")._asdict()))
    start = time.monotonic()
    with checkpoint.lock_folder(tmp_path):
        assert time.monotonic() - start < PATIENCE  # half of the time after which it would be stale


def test_control_characters_of_a_lock_are_escaped(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"host": "\x1b]0;owned\x07", "process": 12}))
    with (
        pytest.raises(UsageError, match=re.escape(r"process 12 on \x1b]0;owned\x07 ")),
        checkpoint.lock_folder(tmp_path),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"host": "x", "process": []}', b"[" * 1000,
                                     b'{"host": "x", "process": 1e999}'])  # fmt: skip
def test_lock_without_owner_is_stale(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    with checkpoint.lock_folder(tmp_path):
        pass


def test_empty_run_leaves_no_folder(tmp_path):
    with checkpoint.lock_folder(tmp_path / "a" / "run"):
        pass
    assert not (tmp_path / "a").exists()
    with checkpoint.lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "config.json").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_lock_that_is_a_link_is_not_followed(tmp_path):
    """In a run folder that came from elsewhere it may lead to any file."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(RunError, match=r"cannot write in .*symbolic links"), checkpoint.lock_folder(tmp_path / "run"):
        pass
    assert precious.read_text() == "kept"


@pytest.mark.parametrize("process", [10**30, 0, -1])
def test_impossible_process_number_is_dead(process):
    assert is_known_dead(this_process()._replace(process=process))


def test_process_that_proc_hides_is_not_known_dead(monkeypatch):
    """Under hidepid=2, /proc does not show the processes of other users; signals are still refused, not lost."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    other_user = this_process()._replace(process=ended.pid)
    assert is_known_dead(other_user)
    let_fail(monkeypatch, os, "kill", PermissionError())
    assert not is_known_dead(other_user)
