"""`data=` in a bucket: every kind of source is the same as on a disk."""

import json

import jax
import numpy as np
import pytest

from shardformer.data import corpus, file_sources, prepare, tfrecords
from shardformer.data.source import SourceOptions
from shardformer.data.vocabulary import Bytes
from shardformer.errors import RunError, UsageError
from shardformer.storage import BucketPath
from tests.shared import tiny
from tests.surroundings import open_memory_buckets

FOLDER = "gs://bucket/data"


@pytest.fixture(autouse=True)
def upload(monkeypatch, tmp_path):
    """Puts a file or a folder of the disk into a bucket in memory."""
    open_memory_buckets(monkeypatch)
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))

    def put(path):
        place = BucketPath("gs", "bucket", "data")
        for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
            (place / file.relative_to(path.parent).as_posix()).write_bytes(file.read_bytes())

    return put


def load(data, **overrides):
    return corpus.load_corpus(tiny(data=str(data), **overrides))


def assert_same(in_bucket: corpus.Corpus, on_disk: corpus.Corpus, name: str):
    assert in_bucket.name == f"{FOLDER}/{name}"
    assert in_bucket.fingerprint == on_disk.fingerprint
    assert in_bucket.vocabulary.sha256 == on_disk.vocabulary.sha256
    config = tiny(data="", batch=4, seq=8, vocab=300)
    assert in_bucket.held_out == on_disk.held_out
    theirs, ours = (next(found.train_batches(config)) for found in (on_disk, in_bucket))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": f"page {i} " * 9}) + "\n" for i in range(90)))
    recipe = file_sources.find_recipe([str(tmp_path / "pages.jsonl")], SourceOptions(share=0.2))
    return prepare.prepare(recipe, Bytes(), tmp_path / "tokens").path


def write_records(path, count: int = 40):
    tfrecords.write_records(path, (np.arange(17) + number for number in range(count)))
    return path


@pytest.mark.parametrize("name", ["notes.txt", "pages", "ids.npy", "tokens", "x.tfrecords"])
def test_a_source_in_a_bucket_is_that_of_the_disk(tmp_path, upload, prepared, name):
    (tmp_path / "notes.txt").write_text("to be or not to be\n" * 40)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "a.jsonl").write_bytes((tmp_path / "pages.jsonl").read_bytes())
    np.save(tmp_path / "ids.npy", np.arange(1000) % 7)
    write_records(tmp_path / "x.tfrecords")
    upload(tmp_path / name)
    assert_same(load(f"{FOLDER}/{name}"), load(tmp_path / name), name)


@pytest.mark.parametrize("line", ["x.tfrecords", f"{FOLDER}/x.tfrecords"])
@pytest.mark.parametrize("index_in_bucket", [True, False])
def test_an_index_names_its_files_beside_it_or_in_the_bucket(tmp_path, upload, line, index_in_bucket):
    upload(write_records(tmp_path / "x.tfrecords"))
    (tmp_path / "x.index").write_text(f"{line}\n")
    upload(tmp_path / "x.index")
    found = load(f"{FOLDER}/x.index" if index_in_bucket else tmp_path / "x.index")
    assert len(found.splits("train")[0].tokens) == 36 * 17


def test_a_damaged_prepared_folder_is_rejected_and_not_kept(tmp_path, upload, prepared):
    upload(prepared)
    part = BucketPath("gs", "bucket", "data/tokens/part_00000.train.bin")
    content = bytearray(part.read_bytes())
    content[7] ^= 1
    part.write_bytes(bytes(content))
    for _ in range(2):
        with pytest.raises(RunError, match=r"part_00000.train.bin is damaged: it has the sha256"):
            load(f"{FOLDER}/tokens")
    upload(prepared)
    load(f"{FOLDER}/tokens")


def test_sources_of_a_bucket_and_of_the_disk_are_mixed(tmp_path, upload):
    for name in ("a.bin", "b.bin"):
        (np.arange(3000) % 11).astype("<u2").tofile(tmp_path / name)
    upload(tmp_path / "a.bin")
    found = load(f"{FOLDER}/a.bin=3,{tmp_path}/b.bin=1")
    assert found.weights == (3.0, 1.0)
    assert found.name == f"{FOLDER}/a.bin=3,{tmp_path}/b.bin=1"


@pytest.mark.parametrize(
    ("name", "message"),
    [("*.txt", "patterns are not looked up in a bucket; name a file or a folder there"), ("gone", "does not exist")],
)
def test_what_is_not_there(name, message):
    with pytest.raises(UsageError, match=message):
        load(f"{FOLDER}/{name}")
