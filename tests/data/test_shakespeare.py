"""The search for tiny_shakespeare never hangs, and its preparation never leaves an incomplete cache."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardformer.data import shakespeare
from shardformer.errors import RunError, UsageError
from tests.waiting import PATIENCE


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    return folder


class FakeBuilder:
    """The parts of a TFDS builder that `shakespeare` uses; its download may fail, or finish after another process's."""

    def __init__(self, folder, fails=False, overtaken_by=None):
        self.data_dir = str(Path(folder) / "tiny_shakespeare" / "1.0.0")
        self.fails, self.overtaken_by = fails, overtaken_by

    def is_prepared(self):
        return (Path(self.data_dir) / "dataset_info.json").exists()

    def download_and_prepare(self, **_):
        Path(self.data_dir).mkdir(parents=True)
        if self.fails:
            raise ConnectionError("cut off")
        (Path(self.data_dir) / "dataset_info.json").write_text("mine")
        if self.overtaken_by:
            self.overtaken_by()


@pytest.fixture
def use_fake(monkeypatch):
    def use(**options):
        monkeypatch.setattr(shakespeare, "_make_builder", lambda folder: FakeBuilder(folder, **options))

    return use


def _files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _finished(cache, name, content):
    folder = cache / "tiny_shakespeare" / "1.0.0"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)


def test_probe_ends_where_name_servers_hang(cache, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(2 * PATIENCE) and [])
    began = time.monotonic()
    assert not shakespeare.can_download(seconds=0.2)
    assert time.monotonic() - began < PATIENCE
    released.set()


def test_probe_ends_where_packets_vanish(cache, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        began = time.monotonic()
        assert not shakespeare.can_download(f"http://127.0.0.1:{silent.getsockname()[1]}/input.txt", 0.2)
        assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(("status", "found"), [("200 OK", True), ("404 Not Found", False)])
def test_probe_tells_what_the_server_answers(cache, monkeypatch, status, found):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert shakespeare.can_download(f"http://127.0.0.1:{server.getsockname()[1]}/input.txt", PATIENCE) == found


def test_asking_for_the_data_set_makes_nothing(cache):
    assert not shakespeare.is_prepared()
    assert not cache.exists()


@pytest.mark.slow
def test_prepared_as_a_whole(cache, use_fake):
    use_fake()
    shakespeare._prepare()
    assert _files(cache) == ["tiny_shakespeare/1.0.0/dataset_info.json"]
    assert list(cache.glob("incomplete.*")) == []


def test_another_process_may_be_faster(cache, use_fake):
    use_fake(overtaken_by=lambda: _finished(cache, "dataset_info.json", "theirs"))
    shakespeare._prepare()
    assert (cache / "tiny_shakespeare/1.0.0/dataset_info.json").read_text() == "theirs"


def test_half_copied_cache_is_named(cache, use_fake):
    use_fake()
    _finished(cache, "features.json", "half")
    with pytest.raises(RunError, match=r"tiny_shakespeare/1\.0\.0.*delete that folder"):
        shakespeare._prepare()


def test_failed_download_leaves_nothing_and_says_what_else_to_do(cache, use_fake, monkeypatch):
    use_fake(fails=True)
    monkeypatch.setattr(shakespeare, "can_download", lambda: True)
    with pytest.raises(UsageError, match=r"cut off(.|\n)*data import input\.txt"):
        shakespeare.load_splits()
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch, use_fake):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "file" / "cache"))
    use_fake()
    with pytest.raises(UsageError, match="set TFDS_DATA_DIR"):
        shakespeare._prepare()


def test_bucket_is_not_prepared_in(monkeypatch, use_fake):
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/cache")
    use_fake()
    with pytest.raises(UsageError, match="in a bucket"):
        shakespeare._prepare()


def test_import_refuses_another_file(cache, tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("To be, or not.")
    with pytest.raises(UsageError, match=r"expected 1,115,394 bytes with sha256 86c4.*got 14 bytes") as caught:
        shakespeare.import_shakespeare(path)
    assert str(path) in str(caught.value)
    assert not cache.exists()


def test_import_of_nothing(tmp_path):
    path = tmp_path / "input.txt"
    with pytest.raises(UsageError) as caught:
        shakespeare.import_shakespeare(path)
    for words in (f"cannot read {path}: No such file or directory", shakespeare.URL):
        assert words in str(caught.value)


@pytest.mark.parametrize("metadata", ["{", '{"name": "tiny_shakespeare", "version": "1.0.0"}'])
def test_damaged_cache_is_named(cache, metadata):
    _finished(cache, "dataset_info.json", metadata)
    with pytest.raises(RunError, match=r"tiny_shakespeare.*(.|\n)*delete that folder"):
        shakespeare.load_splits()


def test_a_field_that_is_no_text_is_refused(monkeypatch):
    import tensorflow_datasets

    rows = SimpleNamespace(as_numpy_iterator=lambda: iter([{"label": np.int64(1)}]))
    builder = SimpleNamespace(
        is_prepared=lambda: True,
        as_dataset=lambda split: rows,
        info=SimpleNamespace(features={"label": 0}, splits={"train": 0}),
    )
    monkeypatch.setattr(tensorflow_datasets, "builder", lambda *_, **__: builder)
    with pytest.raises(UsageError, match="'label' is not UTF-8 text"):
        shakespeare.load_tfds_splits("x", "label")
