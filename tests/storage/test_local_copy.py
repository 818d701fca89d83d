"""Copies of objects on the disk: complete, of one version, checked, and shared; or not there."""

import contextlib
import fcntl
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardformer.errors import RunError, UsageError
from shardformer.storage import bucket, cache_folder, local_path, on_disk
from shardformer.storage.local_copy import copy_files, copy_to_disk
from tests.surroundings import change_copies, hide_home, simulate_free_space


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    change_copies(monkeypatch, range=10)


def put(place, **contents):
    for name, content in contents.items():
        (place / name).write_bytes(content)


def in_cache() -> set[str]:
    return {path.name for path in (cache_folder() / "copies").glob("*") if not path.name.endswith(".lock")}


def test_folder_is_copied_again_after_a_change(place, said):
    put(place, a=b"x" * 25, empty=b"", ten=b"0123456789")
    (place / "deep" / "b").write_bytes(b"in a folder")
    first = copy_to_disk(place)
    contents = {path.relative_to(first).as_posix(): path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert contents == {"a": b"x" * 25, "empty": b"", "ten": b"0123456789", "deep/b": b"in a folder"}
    assert said[0].startswith(f"copying {place} (0.0 MB) to ")
    assert copy_to_disk(place) == first
    assert len(said) == 1
    put(place, a=b"y" * 25)
    second = copy_to_disk(place)
    assert (second / "a").read_bytes() == b"y" * 25
    assert len(said) == 2
    assert len(in_cache()) == 1  # the first is gone


def test_a_copy_that_another_process_uses_stays(place):
    put(place, a=b"1")
    first = copy_to_disk(place)
    folder = next(path for path in first.parents if path.parent.name == "copies")
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as another process would
    put(place, a=b"22")
    copy_to_disk(place)
    assert (first / "a").read_bytes() == b"1"
    os.close(descriptor)
    put(place, a=b"333")
    assert (copy_to_disk(place) / "a").read_bytes() == b"333"
    assert len(in_cache()) == 1


@contextlib.contextmanager
def replace_reads(act):
    """Calls `act(read, path, start, length, version)` for each read of a range."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "read_range_of_version", functools.partial(act, bucket.read_range_of_version))
        yield


def test_an_object_is_copied_under_its_own_name(place):
    put(place, **{"x.zstd.tfrecords": b"records"})
    path = copy_to_disk(place / "x.zstd.tfrecords")
    assert path.as_posix().endswith(f"/{place.bucket}/{place.key}/x.zstd.tfrecords")
    assert path.read_bytes() == local_path(place / "x.zstd.tfrecords").read_bytes() == b"records"
    assert local_path(path) == path


def test_interrupted_copy_is_invisible_and_continues(place, monkeypatch):
    put(place, **{str(number): b"content" for number in range(6)})
    made = []

    def read_three(read, path, *more):
        made.append(path)
        if len(made) > 3:
            raise OSError(5, "the network is gone", str(path))
        return read(path, *more)

    change_copies(monkeypatch, threads=1)
    with (
        replace_reads(read_three),
        pytest.raises(RunError, match=rf"cannot copy {place} to .*: the network is gone; start again"),
    ):
        copy_to_disk(place)
    assert all(name.startswith(".") for name in in_cache())
    made.clear()
    with replace_reads(lambda read, *given: (made.append(given), read(*given))[1]):
        assert len(list(copy_to_disk(place).iterdir())) == 6
    assert len(made) == 3


def test_short_answer_is_not_copied(place):
    """Zeros would fill the rest. The twin: with all its bytes the same copy is made."""
    put(place, a=b"x" * 25)
    message = rf"cannot copy {place}/a to .*{place}/a gave \d+ bytes of \d+; start again"
    with replace_reads(lambda read, *given: read(*given)[:-1]), pytest.raises(RunError, match=message):
        copy_to_disk(place / "a")
    assert all(name.startswith(".") for name in in_cache())
    assert copy_to_disk(place / "a").read_bytes() == b"x" * 25


def test_object_that_changes_during_the_copy_is_rejected(place, monkeypatch):
    """The twin: without the change, the same reads give the copy."""
    put(place, a=b"x" * 25)

    def change(read, path, start, *more):
        if start == 20:
            path.write_bytes(b"y" * 25)
        return read(path, start, *more)

    change_copies(monkeypatch, threads=1)
    with (
        replace_reads(change),
        pytest.raises(RunError, match=f"{place}/a has changed while it was copied; start again"),
    ):
        copy_to_disk(place / "a")
    assert copy_to_disk(place / "a").read_bytes() == b"y" * 25


def test_a_copy_that_fails_its_check_is_not_kept(place):
    put(place, a=b"damaged")

    def check(path: Path):
        if (path / "a").read_bytes() == b"damaged":
            raise RunError("a is damaged")

    for _ in range(2):
        with pytest.raises(RunError, match="a is damaged"):
            copy_to_disk(place, check)
        assert in_cache() == set()
    put(place, a=b"sound")
    assert (copy_to_disk(place, check) / "a").read_bytes() == b"sound"


def test_simultaneous_readers_copy_once(place):
    put(place, a=b"x" * 100)
    made, go = [], threading.Barrier(4)

    def start(_):
        go.wait()
        return copy_to_disk(place)

    count = replace_reads(lambda read, *given: (made.append(given), read(*given))[1])
    with count, ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(start, range(4)))
    assert (path / "a").read_bytes() == b"x" * 100
    assert len(made) == 10


def test_files_of_several_folders_are_one_copy(place):
    put(place, a=b"1")
    other = place.parent / "other"
    put(other, b=b"2")
    paths = copy_files("two", [place / "a", other / "b"])
    assert [path.read_bytes() for path in paths] == [b"1", b"2"]
    with pytest.raises(UsageError, match=f"{place}/gone does not exist"):
        copy_files("two", [place / "a", place / "gone"])


def test_copy_errors_name_the_fix(place, monkeypatch):
    with pytest.raises(UsageError, match=f"{place} does not exist"):
        copy_to_disk(place)
    put(place, a=b"x" * 25)
    simulate_free_space(monkeypatch, 24)
    with pytest.raises(UsageError, match=r"has 0.0 GB to copy, and the disk of .* has room for 0.0 GB.*CACHE="):
        copy_to_disk(place)


def test_path_in_an_unknown_home_is_rejected(monkeypatch):
    """A folder named ~ would be made in the current one."""
    hide_home(monkeypatch)
    for find in (local_path, lambda name: on_disk(name, "out")):
        with pytest.raises(UsageError, match=r"~/a\.txt: HOME is not set"):
            find("~/a.txt")
