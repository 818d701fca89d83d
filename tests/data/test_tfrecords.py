"""TFRecords: TensorFlow reads what we write and writes what we read; order, damage, and GPT-J's loader."""

import importlib
import os
import sys
import types
import zlib
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from shardformer import Config, data
from shardformer.data import record_format, tfrecords
from shardformer.data.tensorflow import import_tensorflow
from shardformer.data.windows import RowLayout
from shardformer.errors import RunError, UsageError
from tests.surroundings import change_text_limits

PEER = os.environ.get("MESH_TRANSFORMER_JAX", "")
IDS = 17  # of a record


def records(count, first=0):
    found = np.random.RandomState(first).randint(0, 50_400, (count, IDS))
    found[:, 0] = np.arange(first, first + count)  # each says which it is
    return found


def write_with_tf(path, rows):
    tf = import_tensorflow()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=row))
            example = tf.train.Example(features=tf.train.Features(feature={"text": feature}))
            writer.write(example.SerializeToString())


@pytest.fixture
def index(tmp_path):
    """Files of 7, 0, 5 and 9 records."""
    lines, first = [], 0
    for number, count in enumerate((7, 0, 5, 9)):
        write_with_tf(tmp_path / f"f_{number}.tfrecords", records(count, first))
        lines.append(str(tmp_path / f"f_{number}.tfrecords"))
        first += count
    (tmp_path / "all.index").write_text("\n".join(lines) + "\n")
    return tmp_path / "all.index"


def test_a_known_checksum():
    assert record_format.crc32c(np.frombuffer(b"123456789", np.uint8)[None])[0] == 0xE3069283
    long = np.random.RandomState(0).randint(0, 256, (2, 3 * record_format.BLOCK + 2)).astype(np.uint8)
    changed = long.copy()
    changed[0, 5000] ^= 1
    assert (record_format.crc32c(long) == record_format.crc32c(changed)).tolist() == [False, True]


@pytest.mark.slow
def test_tensorflow_reads_what_we_write_byte_for_byte(tmp_path):
    rows = np.vstack([records(5), [[0, 127, 128, 16383, 16384, 50_399, 2**21, *range(10)]]])
    tfrecords.write_records(tmp_path / "ours.tfrecords", rows)
    write_with_tf(tmp_path / "theirs.tfrecords", rows)
    assert (tmp_path / "ours.tfrecords").read_bytes() == (tmp_path / "theirs.tfrecords").read_bytes()


def test_every_record_comes_back(index):
    found = tfrecords.Records.open(index)
    rows = [file.ids(record) for file in found.files for record in range(len(file))]
    assert np.array_equal(rows, np.vstack([records(7), records(5, 7), records(9, 12)]))
    one = data.load_corpus(Config.of(data=str(index.parent / "f_3.tfrecords"), seq=16, batch=2, vocab=50_400))
    assert len(one.splits("train")[0]) == 7 * IDS


def test_a_run_reads_them(index):
    config = Config.of(data=str(index), seq=16, batch=4, vocab=50_400, validation=str(index))
    corpus = data.load_corpus(config)
    batches = corpus.train_batches(config)
    seen = [next(batches)["tokens"][:, 0] for _ in range(21)]
    assert sorted(np.concatenate(seen).tolist()) == sorted([*range(21)] * 4)
    evaluated = list(corpus.eval_batches("validation", config).gather())
    assert sum(batch["weights"].sum() for batch in evaluated) == 21 * 16
    with pytest.raises(
        UsageError, match=r"holds 17 ids, which give 16 tokens; seq=5 does not divide that; give seq=16"
    ):
        corpus.train_batches(config.replace(seq=5))
    halves = next(corpus.train_batches(config.replace(seq=8, order="file")))
    assert np.array_equal(halves["targets"][0, -1:], halves["tokens"][1, :1])
    with pytest.raises(UsageError, match="TFRecords hold no documents"):
        corpus.train_batches(config.replace(documents="padded"))


def file_order(index, batch, steps):
    (split,) = tfrecords.Records.open(index).splits(0).values()
    windows = split.make_windows(RowLayout(IDS - 1))
    return [windows.gather(windows.rows_in_file_order(step, batch))["tokens"][:, 0].tolist() for step in range(steps)]


def test_file_order_drops_the_last_partial_batch_of_each_file(index):
    assert file_order(index, 4, 6) == [[0, 1, 2, 3], [7, 8, 9, 10], [12, 13, 14, 15], [16, 17, 18, 19]] + [
        [0, 1, 2, 3], [7, 8, 9, 10]]  # fmt: skip
    with pytest.raises(UsageError, match=r"no file of .* has batch=10 records"):
        file_order(index, 10, 1)


def flip(place):
    def damage(content):
        content = bytearray(content)
        content[place] ^= 1
        return bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda c: c[:-1], UsageError, r"f_0\.tfrecords is truncated or damaged in record 6"),
        (lambda c: c + b"123", UsageError, r"f_0\.tfrecords is truncated in record 7"),
        (flip(8), UsageError, r"record 0: its header's checksum is wrong"),
        (flip(3), UsageError, r"truncated or damaged in record 0"),
        (flip(30), RunError, r"record 0: its checksum is wrong; the file is damaged"),
    ],
)
def test_damage_is_named(index, damage, kind, message):
    path = index.parent / "f_0.tfrecords"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(kind, match=message):
        file_order(index, 2, 1)


def test_other_contents_are_named(tmp_path):
    tf = import_tensorflow()
    other = tf.train.Example(features=tf.train.Features(feature={"body": tf.train.Feature()})).SerializeToString()
    too_large, negative = (tfrecords._format_example([number]) for number in (2**31, -1))
    endless = b"\xff" * 300_000 + b"\x01"  # as one number it would take minutes
    for content in (b"", b"\xff" * 40, endless, other, too_large, negative, too_large[:-1]):
        with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecords")) as writer:
            writer.write(content)
        with pytest.raises(RunError, match=r"record 0: it is not a tf\.train.Example with token ids in `text`"):
            tfrecords.Records.open(tmp_path / "a.tfrecords")
    write_with_tf(tmp_path / "a.tfrecords", [range(5), range(6)])
    with pytest.raises(RunError, match="record 1 holds 6 ids, the first one 5; all must have as many"):
        file_order_of_two(tmp_path / "a.tfrecords")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.index").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not an index of TFRecords"):
        tfrecords.Records.open(tmp_path / "a.index")
    for lines, message in (("gs://bucket/../a", "has . or .. in its path"), ("gone.tfrecords", "cannot read"),
                           ("a\0b", "cannot read"), (str(tmp_path / "pipe"), "cannot read")):  # fmt: skip
        (tmp_path / "a.index").write_text(lines)
        with pytest.raises(UsageError, match=message):
            tfrecords.Records.open(tmp_path / "a.index")


def file_order_of_two(path):
    (split,) = tfrecords.Records.open(path).splits(0).values()
    split.make_windows(RowLayout(4)).gather(np.arange(2))


def test_packed_by_name(tmp_path, index, monkeypatch):
    folder = tmp_path / "x.zstd"
    folder.mkdir()
    path = folder / "a.tfrecords"
    path.write_bytes(zlib.compress((index.parent / "f_0.tfrecords").read_bytes()))
    (found,) = tfrecords.Records.open(path, cache=tmp_path / "cache").files
    assert np.array_equal([found.ids(record) for record in range(7)], records(7))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="is truncated: its ZLIB stream is incomplete"):
        tfrecords.Records.open(path, cache=tmp_path / "cache")
    change_text_limits(monkeypatch, line=100_000)
    path.write_bytes(zlib.compress(bytes(50_000_000)))
    with pytest.raises(UsageError, match="grows more than 200 times when it is unpacked"):
        tfrecords.Records.open(path, cache=tmp_path / "cache")


@pytest.fixture
def peer(monkeypatch):
    """mesh-transformer-jax's modules, with what they import and do not use here replaced by nothing."""
    if not PEER:
        pytest.skip("MESH_TRANSFORMER_JAX does not name a copy of mesh-transformer-jax")
    monkeypatch.syspath_prepend(PEER)
    stub = types.ModuleType("stub")
    stub.GPT2TokenizerFast, stub.Reader = mock.MagicMock(), mock.MagicMock()

    def tqdm(found, **_):
        return found

    stub.tqdm = tqdm
    for name in ("transformers", "ftfy", "lm_dataformat", "tqdm"):
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    yield lambda name: importlib.import_module(name)
    for name in ("tfrecord_loader", "create_finetune_tfrecords"):
        sys.modules.pop(name, None)


def test_gptj_reads_the_same_batches_in_the_same_order(peer, index):
    loader = peer("tfrecord_loader").TFRecordNewInputs(str(index), (4,), IDS - 1)
    theirs = [loader.get_samples()[:, 0].tolist() for _ in range(9)]
    assert theirs == file_order(index, 4, 9)
    used = [str(index.parent / f"f_{number}.tfrecords") for number in range(3)]
    state = {"used": used, "file_idx": 0}  # after the first batch of the last file
    resumed = peer("tfrecord_loader").TFRecordNewInputs(str(index), (4,), IDS - 1, restore_state=state)
    assert resumed.get_samples()[:, 0].tolist() == file_order(index, 4, 4)[3]


def test_gptj_writes_the_same_records(peer, tmp_path, monkeypatch):
    creator = peer("create_finetune_tfrecords")
    documents = [np.random.RandomState(n).randint(0, 50_000, 40 + 13 * n).tolist() for n in range(9)]
    sequences = list(creator.arrays_to_sequences(documents, IDS))
    creator.write_tfrecord(sequences[:-1], str(tmp_path / "theirs.tfrecords"))
    ids = np.concatenate(documents)
    count = len(ids) // IDS
    tfrecords.write_records(tmp_path / "ours.tfrecords", ids[: count * IDS].reshape(count, IDS))
    assert Path(tmp_path / "ours.tfrecords").read_bytes() == Path(tmp_path / "theirs.tfrecords").read_bytes()
