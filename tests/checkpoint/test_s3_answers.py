"""Saves and leases under every answer that S3 documents for conditional puts."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import lease
from shardformer.checkpoint.lock import NAME
from shardformer.errors import RunError
from shardformer.storage import BucketPath, bucket
from tests.launch import SECONDS
from tests.storage.fake_s3 import RESET_AFTER, RESET_BEFORE, is_create, is_put, is_swap, serving
from tests.surroundings import change_patience
from tests.waiting import PATIENCE

ACQUIRE = """
import sys
from shardformer import checkpoint
from shardformer.checkpoint import lease

with checkpoint.lock_folder(sys.argv[1], lease.TIMES._replace(expire=int(sys.argv[2]), watch=0.1)):
    print("taken")
"""
TEMPORARY = ["ConditionalRequestConflict", "OperationAborted", "SlowDown", "InternalError", "RequestTimeout"]
TEMPORARY += [RESET_BEFORE, RESET_AFTER]
_numbers = itertools.count()


@pytest.fixture
def s3(monkeypatch):
    change_patience(monkeypatch, pause=0.01)
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def out():
    """A bucket of its own, because the clients of buckets are cached."""
    return BucketPath("s3", f"bucket-{next(_numbers)}", "runs/one")


def is_manifest(method, key, headers) -> bool:
    return is_create(method, key, headers) and key.endswith("manifest.json")


def is_new_lock(method, key, headers) -> bool:
    return is_create(method, key, headers) and key.endswith(NAME)


def save(out, lock=None):
    return checkpoint.save(out, 40, {"x": jnp.arange(4.0)}, {"progress.json": "{}"}, lock)


@pytest.mark.parametrize("answer", [*TEMPORARY, "NoSuchKey"])
@pytest.mark.parametrize("count", [1, 4])
def test_save_is_published_after_temporary_answers(s3, out, answer, count):
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)) as held:
        s3.fail(is_manifest, *[answer] * count)
        save(out, held)
    assert not s3.answers
    assert checkpoint.list_steps(out) == [40]


@pytest.mark.parametrize("answer", [*TEMPORARY, "NoSuchKey"])
def test_run_starts_after_temporary_answers(s3, out, answer):
    s3.fail(is_new_lock, answer, answer)
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)) as held:
        held.renew()
    assert not s3.answers


@pytest.mark.parametrize("answer", TEMPORARY)
def test_renewal_survives_temporary_answers(s3, out, answer):
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)) as held:
        s3.fail(is_swap, answer)
        held.renew()
        held.check_still_locked()
    assert not s3.answers


@pytest.mark.parametrize("answer", TEMPORARY)
def test_records_survive_temporary_answers(s3, out, answer):
    s3.fail(is_put, answer)
    (out / "config.json").write_bytes(b"{}")
    assert (out / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("answer", TEMPORARY[:5])
def test_delete_and_list_survive_temporary_answers(s3, out, answer):
    (out / "a").write_bytes(b"1")
    s3.fail(lambda method, key, headers: method in ("DELETE", "POST", "GET"), answer)
    (out / "a").unlink()
    s3.fail(lambda method, key, headers: method in ("DELETE", "POST", "GET"), answer)
    assert bucket.list_objects(out) == {}


def test_lock_deleted_between_two_requests_is_created(s3, out):
    """`create` finds an object, which is deleted before it is read."""
    bucket.create(out / NAME, lease.make_record("other"))
    key = f"{out.key}/{NAME}"
    take = s3.take_answer

    def delete_before_read(method, name, headers):
        if method == "GET" and name == key:
            s3.objects.pop(key, None)
        return take(method, name, headers)

    s3.take_answer = delete_before_read
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)):
        s3.take_answer = take


def test_checkpoint_of_another_run_is_still_reported(s3, out):
    """The negative twin: a 412 is an answer."""
    save(out)
    with pytest.raises(RunError, match="The checkpoint exists already"):
        save(out)
    s3.objects.clear()
    s3.fail(is_manifest, "PreconditionFailed")
    with pytest.raises(RunError, match="The checkpoint exists already"):
        save(out)


def test_deleted_lock_is_still_reported(s3, out):
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)) as held:
        s3.objects.clear()
        with pytest.raises(checkpoint.FolderLost, match="was deleted while this run was training"):
            held.renew()


def test_missing_bucket_is_reported_at_once(s3, out):
    s3.fail(lambda *_: True, *["NoSuchBucket"] * 20)
    with (
        pytest.raises(RunError, match="does not exist; create it first"),
        checkpoint.lock_folder(out, lease.TIMES._replace(renew=60)),
    ):
        pass
    assert len(s3.requests) < 8


def test_conflict_that_stays_is_reported(s3, out, monkeypatch):
    change_patience(monkeypatch, most=0.05, first=0.05)
    s3.fail(is_manifest, *["ConditionalRequestConflict"] * 1000)
    with pytest.raises(RunError, match="ConditionalRequestConflict"):
        save(out)


OTHER_PROCESSES = ["-pf", "--mount-proc"]  # as a container of this host name: no process of this one is seen
OTHER_CLOCK = ["-f", "--time", "--boottime", "100000"]  # another start is read for each process


def acquire_in_new_namespace(out, options=OTHER_PROCESSES, expire=60) -> subprocess.CompletedProcess:
    """Acquires the lock in a namespace that `unshare` makes."""
    command = ["unshare", *options]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("unshare needs a kernel and a user that may make namespaces")
    words = [*command, sys.executable, "-c", ACQUIRE, str(out), str(expire)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [OTHER_PROCESSES, OTHER_CLOCK], ids=["processes", "clock"])
def test_live_run_is_not_taken_over_from_another_namespace(s3, out, options):
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=0.2)) as held:
        found = acquire_in_new_namespace(out, options)
        held.check_still_locked()
    assert "is in use by process" in found.stderr
    assert "taken" not in found.stdout


@pytest.mark.multiprocess
def test_dead_run_is_taken_over_from_another_namespace_in_time(s3, out):
    """The negative twin: nothing renews the lease."""
    bucket.create(out / NAME, lease.make_record("dead"))
    found = acquire_in_new_namespace(out, expire=3)
    assert "waiting up to 3 s" in found.stdout
    assert found.stdout.endswith("taken\n")


@pytest.mark.parametrize("field", ["boot", "namespace", "started"])
def test_lease_of_a_reused_process_number(s3, out, field):
    """Only a later start in the same namespace proves that the run is dead."""
    record = json.loads(lease.make_record("other"))
    record[field] = record[field] - 1 if field == "started" else f"{record[field]}x"
    bucket.create(out / NAME, json.dumps(record).encode())
    known_dead = field == "started"
    expire = PATIENCE if known_dead else 1
    start = time.monotonic()
    with checkpoint.lock_folder(out, lease.TIMES._replace(expire=expire)):
        assert (time.monotonic() - start < expire) == known_dead
