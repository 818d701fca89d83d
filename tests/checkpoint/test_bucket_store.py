"""Checkpoints in a bucket: large files in parts, publishing without a rename, and the removal of leftovers."""

import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.checkpoint.bucket_store import PartWriter
from shardformer.errors import RunError, UsageError
from shardformer.storage import BucketPath, bucket, download_records, local_folder, location, upload_records
from tests.checkpoint import places
from tests.checkpoint.cases import here
from tests.surroundings import before_call, change_blocks, change_bucket_store

PART = 1000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=places.KINDS[1:])
def kind(request):
    if request.param != "memory":
        request.getfixturevalue("emulators")
    return request.param


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    change_bucket_store(monkeypatch, part=PART)


def rows(count: int) -> dict:
    return {"x": jnp.arange(count * 10.0).reshape(count, 10), "y": jnp.ones(7)}


def restore(folder, state):
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here()) for name, leaf in state.items()}
    restored = checkpoint.restore(folder, like)
    for name, leaf in state.items():
        np.testing.assert_array_equal(restored[name], leaf)


@pytest.mark.parametrize("count", [0, 1, 22, 100])
def test_files_are_split_into_parts_and_read_across_them(out, count):
    state = rows(count)
    folder = checkpoint.save(out, 1, state, {})
    sizes = [size for name, size in sorted(bucket.list_objects(folder).items()) if ".npy." in name]
    assert set(sizes[:-1]) <= {PART}
    assert 0 < sizes[-1] <= PART
    restore(folder, state)
    checkpoint.verify(folder)


def test_parts_of_another_size_can_be_read(out, monkeypatch):
    """As another version of this package may write them."""
    folder = checkpoint.save(out, 1, rows(100), {})
    change_bucket_store(monkeypatch, part=3 * PART)
    restore(folder, rows(100))


def test_checkpoint_copied_to_a_disk_can_be_read(out, tmp_path):
    """As `gsutil cp` and `aws s3 sync` copy it: each object becomes a file."""
    folder = checkpoint.save(out, 1, rows(100), {"progress.json": "{}"})
    on_disk = tmp_path / folder.name
    for name in bucket.list_objects(folder):
        (on_disk / name).parent.mkdir(parents=True, exist_ok=True)
        (on_disk / name).write_bytes((folder / name).read_bytes())
    restore(on_disk, rows(100))
    checkpoint.verify(on_disk)
    next(on_disk.glob("*/arrays.npy.00002")).unlink()
    with pytest.raises(checkpoint.Damaged, match=r"arrays.npy is truncated: it has 2000 bytes, expected \d+"):
        restore(on_disk, rows(100))


def test_checkpoint_copied_from_a_disk_can_be_read(out, tmp_path):
    folder = checkpoint.save(tmp_path, 1, rows(100), {"progress.json": "{}"})
    for path in folder.iterdir():
        (out / folder.name / path.name).write_bytes(path.read_bytes())
    checkpoint.save(out, 2, rows(50), {})  # which removes leftovers, but not these
    assert checkpoint.list_steps(out) == [1, 2]
    restore(out / folder.name, rows(100))
    checkpoint.verify(out / folder.name)
    (out / folder.name / "arrays.npy").write_bytes((folder / "arrays.npy").read_bytes()[:2000])
    with pytest.raises(checkpoint.Damaged, match=r"arrays.npy is truncated: it has 2000 bytes, expected \d+"):
        restore(out / folder.name, rows(100))


def test_missing_part_is_named(out):
    folder = checkpoint.save(out, 1, rows(100), {})
    path = places.object_of(folder, "arrays.npy")
    bucket.delete([path.parent / "arrays.npy.00002"])
    with pytest.raises(checkpoint.Damaged, match=r"arrays.npy is truncated: it has \d+ bytes, expected \d+"):
        restore(folder, rows(100))


def most_at_once(monkeypatch, request: str, measure) -> list[int]:
    """Returns a list with the largest sum of `measure(*arguments)` over the requests that are made at the same time."""
    active, most, send, lock = [0], [0], getattr(bucket, request), threading.Lock()

    def count(*arguments):
        with lock:
            active[0] += measure(*arguments)
            most[0] = max(most[0], active[0])
        result = send(*arguments)
        with lock:
            active[0] -= measure(*arguments)
        return result

    monkeypatch.setattr(bucket, request, count)
    return most


def test_at_most_uploads_parts_are_sent_at_once(out, monkeypatch):
    """The negative twin: with uploads=1 there is one."""
    most = most_at_once(monkeypatch, "write", lambda path, content: 1)
    checkpoint.save(out, 1, rows(2000), {})
    assert most[0] <= 4
    change_bucket_store(monkeypatch, part=PART, uploads=1)
    most[0] = 0
    checkpoint.save(out, 2, rows(2000), {})
    assert most[0] == 1


def test_writer_waits_for_uploads_before_the_next_part(out):
    """It holds each part until its upload has ended; the twin holds all parts."""
    for limit in (3, 100):
        uploads = SlowUploads()
        writer = PartWriter(out / f"x-parts-of-{PART}" / "arrays.npy", uploads, PART, limit)
        writer.write(bytes(20 * PART))
        writer.finish()
        assert uploads.most == min(limit, 20)
        assert uploads.active == 0


class SlowUploads:
    """A pool of threads whose uploads end only when they are waited for."""

    def __init__(self):
        self.active = self.most = 0

    def submit(self, *_):
        self.active += 1
        self.most = max(self.most, self.active)
        return self

    def result(self):
        self.active -= 1


def test_remove_hides_the_checkpoint_first(out, monkeypatch):
    """A kill during the removal leaves no damaged checkpoint that can be seen."""
    folder = checkpoint.save(out, 1, rows(100), {})
    delete, seen = bucket.delete, []

    def watch(paths):
        for path in paths:
            delete([path])
            seen.append(checkpoint.list_steps(out))

    monkeypatch.setattr(bucket, "delete", watch)
    checkpoint.prune(out, keep=0, also=set())
    assert len(seen) > 5
    assert not any(seen)
    assert not bucket.list_objects(folder)


def test_restore_reads_few_blocks_at_once(out, monkeypatch):
    """The negative twin: with one thread there is one."""
    change_blocks(monkeypatch, 64)
    folder = checkpoint.save(out, 1, rows(300), {})
    most = most_at_once(monkeypatch, "read_range", lambda path, start, length: length)
    restore(folder, rows(300))
    assert 0 < most[0] <= 128 * 16
    change_bucket_store(monkeypatch, part=PART, read_threads=1)
    most[0] = 0
    restore(folder, rows(300))
    assert 0 < most[0] <= 128


def test_failed_request_of_a_save_loses_and_shows_nothing(out, monkeypatch):
    checkpoint.save(out, 1, rows(50), {})
    made, failing = [], [0]

    def fail_one(path, content, mode):
        made.append(path)
        if len(made) == failing[0]:
            raise OSError(5, "the network is gone", str(path))

    before_call(monkeypatch, bucket, "_put", fail_one)
    checkpoint.save(out, 2, rows(50), {})
    count = len(made)
    assert count >= 5
    for number in range(1, count + 1):
        made.clear()
        failing[0] = number
        with pytest.raises(RunError, match=r"step_00000003: .*the network is gone.*the older ones are intact"):
            checkpoint.save(out, 3, rows(50), {})
        assert checkpoint.list_steps(out) == [1, 2]
        assert not [name for name in bucket.list_objects(out) if "step_00000003" in name]
    failing[0] = 0
    restore(checkpoint.save(out, 3, rows(50), {}), rows(50))


def test_next_save_removes_a_killed_process_leftovers(out):
    sound = checkpoint.save(out, 1, rows(50), {})
    (out / "step_00000002" / "0badcafe" / "arrays.npy.00000").write_bytes(b"part")
    (out / "step_00000001" / "0badcafe" / "arrays.npy.00000").write_bytes(b"of another run that lost the race")
    (out / "metrics.csv").write_bytes(b"step\n")
    assert checkpoint.list_steps(out) == [1]
    checkpoint.save(out, 3, rows(50), {})
    assert not [name for name in bucket.list_objects(out) if "0badcafe" in name]
    assert (out / "metrics.csv").exists()
    restore(sound, rows(50))


def test_records_are_kept_locally_and_uploaded(out, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "one"))
    folder = local_folder(out)
    assert tmp_path / "one" in folder.parents
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "metrics.csv").write_text("step\n1\n")
    (folder / "tensorboard" / "events").write_text("event")
    (folder / ".metrics.csv.tmp").write_text("half")
    upload_records(out)
    (out / "tensorboard" / "events").write_bytes(b"the first upload")
    (folder / "metrics.csv").write_text("step\n1\n2\n")
    upload_records(out)
    assert (out / "tensorboard" / "events").read_bytes() == b"the first upload"  # unchanged locally: not uploaded again
    checkpoint.save(out, 1, rows(1), {})
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "another"))
    folder = local_folder(out)
    folder.mkdir(parents=True)
    (folder / "gradients.csv").write_text("of an earlier run of that name")
    download_records(out, folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "metrics.csv",
        "tensorboard/events",
    }
    assert (folder / "metrics.csv").read_text() == "step\n1\n2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://bucket/run", "is not a supported location; give a folder on a disk, or gs://BUCKET/FOLDER"),
        ("gs://", "names no folder in a bucket; give gs://BUCKET/FOLDER"),
        ("gs://bucket", "names no folder in a bucket"),
        ("s3://bucket/", "names no folder in a bucket"),
        ("://x/y", "is not a supported location"),
    ],
)
def test_urls_that_name_no_run(text, message):
    with pytest.raises(UsageError, match=message):
        location(text)


def test_a_bucket_path_has_a_name_a_parent_and_children():
    path = location("gs://bucket/runs//a/")
    assert str(path) == "gs://bucket/runs//a"
    assert path / "step_1" == BucketPath("gs", "bucket", "runs//a/step_1")
    assert ((path / "b").name, (path / "b").parent) == ("b", path)


@pytest.mark.multiprocess
def test_bucket_without_obstore_is_rejected(tmp_path):
    script = "import sys; sys.modules['obstore'] = None\nimport importlib.util\n"
    script += "importlib.util.find_spec = lambda name, *_: None if name == 'obstore' else 1\n"
    script += "from shardformer.__main__ import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, "train", "tiny", "data=builtin", "out=gs://bucket/run"]
    environment = places.os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "gs://bucket/run is in a bucket, which needs obstore: pip install 'shardformer[bucket]'"
    )
    assert list(tmp_path.iterdir()) == []
