"""One run in a folder of a bucket: who holds the lease, who may take it, and that nobody publishes without it."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import lease
from shardformer.checkpoint.lock import NAME
from shardformer.checkpoint.store import LockTimes
from shardformer.errors import RunError, UsageError
from shardformer.storage import bucket
from tests.checkpoint import places
from tests.surroundings import before_call
from tests.waiting import PATIENCE, wait_for

# A lease that nobody takes over while its renewing thread is stopped for a while; those that are taken expire sooner.
FAST = LockTimes(renew=0.1, expire=PATIENCE, watch=0.05)


@pytest.fixture(scope="module", params=places.KINDS[1:])
def kind(request):
    if request.param != "memory":
        request.getfixturevalue("emulators")
    return request.param


def lock_folder(out, **times):
    return checkpoint.lock_folder(out, FAST._replace(**times))


def save(out, step, lock=None):
    return checkpoint.save(out, step, {"x": jnp.zeros(4)}, {}, lock)


def hold_dead(out):
    """The lease of a process that was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    record = lease.make_record("dead").replace(b'"process": %d' % os.getpid(), b'"process": %d' % process.pid)
    return bucket.create(out / NAME, record)


def hold_elsewhere(out):
    return bucket.create(out / NAME, b'{"host": "elsewhere", "process": 12}')


def take_over(out):
    """Takes the lease, as another run does if the holder was frozen."""
    bucket.write(out / NAME, b'{"host": "elsewhere", "process": 12}')


def test_second_run_is_rejected_while_the_first_lives(out):
    with (
        lock_folder(out),
        pytest.raises(UsageError, match=rf"{out} is in use by process \d+ on .*; stop that run"),
        lock_folder(out),
    ):
        pass
    start = time.monotonic()
    with lock_folder(out) as held:  # released: free at once
        held.check_still_locked()
    assert time.monotonic() - start < PATIENCE


def test_dead_process_of_this_machine_is_replaced_at_once(out):
    hold_dead(out)
    start = time.monotonic()
    with lock_folder(out) as held:
        held.renew()
    assert time.monotonic() - start < PATIENCE


def test_dead_run_of_another_machine_is_taken_over_in_time(out, capsys):
    hold_elsewhere(out)
    start = time.monotonic()
    with lock_folder(out, expire=1.0):
        assert 1 <= time.monotonic() - start < PATIENCE
    assert "last used by process 12 on elsewhere: waiting up to 1.0 s" in capsys.readouterr().out


def test_frozen_run_neither_publishes_nor_releases(out, monkeypatch):
    """It does not renew for long enough, another run takes the folder, and then it goes on."""
    with lock_folder(out) as frozen:
        frozen._released.set()  # as if its process were stopped: no more renewals
        frozen._renewing.join()
        with lock_folder(out, expire=1.0) as second:
            with pytest.raises(RunError, match=f"has taken {out} over"):
                save(out, 40, frozen)
            assert checkpoint.list_steps(out) == []
            with pytest.raises(checkpoint.FolderLost):
                frozen.check_still_locked()
            save(out, 40, second)
            assert checkpoint.list_steps(out) == [40]
        before = bucket.read(out / NAME)
    assert bucket.read(out / NAME) == before


def test_run_frozen_while_publishing_withdraws_its_manifest(out, monkeypatch):
    with lock_folder(out) as frozen:

        def freeze(path, content):
            if path.name == "manifest.json":
                version = bucket.read(out / NAME)[1]
                bucket.swap(out / NAME, b'{"host": "elsewhere", "process": 12}', version)

        before_call(monkeypatch, bucket, "create", freeze)
        with pytest.raises(RunError, match="process 12 on elsewhere has taken"):
            save(out, 40, frozen)
    assert checkpoint.list_steps(out) == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_lost_run_uploads_no_records(out, is_lost):
    """It would overwrite those of the run that has taken the folder. The twin: the owner's are uploaded."""
    uploaded = []
    with lock_folder(out) as held:
        saver = checkpoint.Saver(out, held)
        if is_lost:
            take_over(out)
        saver.save(40, checkpoint.take_snapshot({"x": jnp.zeros(4)}), {}, before=lambda: uploaded.append(1))
        with pytest.raises(RunError, match="has taken") if is_lost else contextlib.nullcontext():
            saver.wait()
        saver.close()
    assert len(uploaded) == (0 if is_lost else 1)


@pytest.mark.parametrize("is_lost", [True, False])
def test_run_lost_while_uploading_puts_no_manifest(out, monkeypatch, is_lost):
    put = []
    with lock_folder(out) as held:
        before_call(monkeypatch, bucket, "create", lambda path, content: put.append(path.name))
        saver = checkpoint.Saver(out, held)
        state = checkpoint.take_snapshot({"x": jnp.zeros(4)})
        saver.save(40, state, {}, before=lambda: take_over(out) if is_lost else None)
        with pytest.raises(RunError, match="has taken") if is_lost else contextlib.nullcontext():
            saver.wait()
        saver.close()
    assert put == ([] if is_lost else ["manifest.json"])


def test_the_lease_is_renewed(out):
    with lock_folder(out):
        version = bucket.read(out / NAME)[1]
        wait_for(lambda: bucket.read(out / NAME)[1] != version)


@pytest.mark.parametrize("prepare", [None, hold_dead])
def test_one_of_sixteen_racers_wins(out, prepare):
    """Sixteen at once for a new folder, and for that of a dead run."""
    if prepare:
        prepare(out)
    go, over, outcomes = threading.Barrier(16), threading.Barrier(16), []

    def race():
        go.wait()
        held = lock_folder(out)
        try:
            held.__enter__()
            outcomes.append("won")
        except UsageError:
            outcomes.append("refused")
        over.wait()
        if outcomes and hasattr(held, "_version") and held._renewing.is_alive():
            held.__exit__(None, None, None)

    racers = [threading.Thread(target=race) for _ in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(outcomes) == ["refused"] * 15 + ["won"]


def lose_answers(monkeypatch):
    """The request arrives and its answer does not; obstore then sends it again."""
    put, lost = bucket._put, []

    def put_once_more(path, content, mode):
        if mode != "overwrite":
            put(path, content, mode)
            lost.append(path)

    before_call(monkeypatch, bucket, "_put", put_once_more)
    return lost


def test_lost_answer_does_not_fail_a_save(out, monkeypatch):
    lost = lose_answers(monkeypatch)
    with lock_folder(out) as held:
        held.renew()
        save(out, 40, held)
    assert checkpoint.list_steps(out) == [40]
    assert len(lost) >= 4


def test_deleted_lease_is_lost(out):
    with lock_folder(out) as held:
        bucket.delete([out / NAME])
        with pytest.raises(checkpoint.FolderLost):
            held.renew()


@contextlib.contextmanager
def fail_swaps(store: bool):
    """Lets swaps fail as without an answer, carried out or not; yields their arguments."""
    swap, sent = bucket.swap, []

    def fail(*arguments):
        sent.append(arguments)
        if store:
            swap(*arguments)
        raise OSError(5, "timed out")

    with pytest.MonkeyPatch.context() as patch:
        before_call(patch, bucket, "swap", fail)
        yield sent


def test_renewal_without_answer_is_recognized(out):
    with lock_folder(out, renew=100) as held:
        with fail_swaps(store=True), pytest.raises(OSError, match="timed out"):
            held.renew()
        held.renew()


def test_renewal_carried_out_late_is_recognized(out):
    """Two renewals fail; the first arrives after the second was given up. The twin: another run's record is a loss."""
    for own in (True, False):
        with lock_folder(out, renew=100) as held:
            with fail_swaps(store=False) as sent:
                for _ in range(2):
                    with pytest.raises(OSError, match="timed out"):
                        held.renew()
            path, record, version = sent[0]
            bucket.swap(path, record if own else lease.make_record("another"), version)
            if own:
                held.renew()
            else:
                with pytest.raises(checkpoint.FolderLost):
                    held.renew()


def test_folder_is_released_after_an_unanswered_renewal(out):
    with lock_folder(out, renew=100) as held, fail_swaps(store=True), pytest.raises(OSError, match="timed out"):
        held.renew()
    assert b'"host": ""' in bucket.read(out / NAME)[0]


def test_waiting_run_gets_a_released_folder(out):
    version = hold_elsewhere(out)
    release = threading.Timer(0.3, bucket.swap, (out / NAME, lease.make_record("other", free=True), version))
    release.start()
    start = time.monotonic()
    with lock_folder(out):
        assert time.monotonic() - start < PATIENCE
    release.join()
