"""Token files of other tools: their contents and their defects."""

import os
import resource

import numpy as np
import pytest

from shardformer import Config, data
from shardformer.data import tfrecords, tokens
from shardformer.errors import RunError, UsageError


@pytest.fixture
def few_open_files():
    """At most MAX_MAPPED files are mapped at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (numbers + tokens.MAX_MAPPED + 20, hard))
    yield tokens.MAX_MAPPED + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_a_process_may_open(tmp_path, few_open_files):
    parts = []
    for number in range(few_open_files):
        np.arange(3 * number, 3 * number + 3, dtype="<u2").tofile(tmp_path / f"{number}.bin")
        parts.append(tokens.MappedFile(tmp_path / f"{number}.bin", np.dtype("<u2"), 3))
    joined = tokens.Tokens(parts, "many")
    for start in (0, 200, 3 * few_open_files - 4, 1):
        assert joined.take(start, 4).tolist() == [start, start + 1, start + 2, start + 3]


def test_more_records_files_than_a_process_may_open(tmp_path, few_open_files):
    tfrecords.write_records(tmp_path / "0.tfrecords", [[5, 6, 7]])
    names = [f"{number}.tfrecords" for number in range(few_open_files)]
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / "0.tfrecords").read_bytes())
    (tmp_path / "all.index").write_text("\n".join(names))
    records = tfrecords.Records.open(tmp_path / "all.index")
    assert len(records.files) == few_open_files
    assert all(file.ids(0).tolist() == [5, 6, 7] for file in records.files)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_file_that_is_cut_short_while_it_is_read(suffix, tmp_path):
    """The system would end the process by SIGBUS; a deleted file stays readable."""
    path, ids = tmp_path / f"ids{suffix}", np.arange(5000, dtype="<u2")
    np.save(path, ids) if suffix == ".npy" else ids.tofile(path)
    part = tokens.open_token_file(path).cut(1000, 5000)
    assert part.take(2990, 3).tolist() == [3990, 3991, 3992]
    size = path.stat().st_size
    os.truncate(path, 100)
    with pytest.raises(RunError, match=rf"ids{suffix} was cut short: it has 100 bytes, expected {size:,}; bring"):
        part.take(2990, 3)
    os.truncate(path, size)
    path.unlink()
    assert len(part.take(0, 2)) == 2


def test_ids_are_read_in_blocks_across_files():
    joined = tokens.Tokens([np.arange(5), np.arange(5, 7), np.arange(7, 20)[::-1]], "three files")
    assert [block.tolist() for block in tokens.read_blocks(joined, 1, 9, step=3)] == [[1, 2, 3], [4, 5, 6], [19, 18]]
    assert tokens.find_largest_id(joined) == 19
    assert tokens.find_largest_id(joined.cut(0, 7)) == 6


def test_ids_are_stored_in_two_bytes_while_they_fit():
    sizes = {1: 2, 65535: 2, 65536: 2, 65537: 4, 10**6: 4}
    assert {size: tokens.id_type(size).itemsize for size in sizes} == sizes


def load(source, **settings):
    return data.load_corpus(Config.of(**{"data": str(source), "seq": 4, "batch": 2} | settings))


@pytest.mark.parametrize("name", ["train.bin", "train.npy"])
def test_token_files_are_split_in_order(tmp_path, name):
    ids = np.arange(1000) % 500
    write(tmp_path / name, ids)
    corpus = load(tmp_path / name)
    found = [corpus.splits(split)[0].tokens for split in ("train", "validation", "test")]
    assert np.array_equal(np.concatenate([part.take(0, len(part)) for part in found]), ids)
    assert [len(part) for part in found] == [900, 50, 50]
    assert len(corpus.vocabulary) == 500
    assert load(tmp_path / name, vocab=600).vocabulary.size == 600


def write(path, ids):
    np.save(path, ids) if path.suffix == ".npy" else ids.astype("<u2").tofile(path)
    return path


def test_validation_of_its_own(tmp_path):
    train, val = (write(tmp_path / name, np.arange(50)) for name in ("train.bin", "val.bin"))
    corpus = load(train, validation=str(val))
    assert len(corpus.splits("train")[0].tokens) == len(corpus.splits("validation")[0].tokens) == 50
    assert corpus.held_out == ("validation",)


def test_a_mixture(tmp_path):
    a, b = (write(tmp_path / name, np.arange(100) + shift) for name, shift in (("a.bin", 0), ("b.npy", 200)))
    corpus = load(f"{a}=3,{b}=1")
    assert corpus.name == f"{a}=3,{b}=1"
    assert corpus.weights == (3.0, 1.0)
    assert load(corpus.name).fingerprint == corpus.fingerprint != load(f"{a}=1,{b}=1").fingerprint
    counted = load(f"{a}=123456789,{b}=0.1")
    assert load(counted.name).fingerprint == counted.fingerprint
    batches = corpus.train_batches(Config.of(data=corpus.name, seq=4, batch=8))
    share = np.mean([batch["tokens"][:, 0] >= 200 for batch, _ in zip(batches, range(20), strict=False)])
    assert share == 0.25
    (whole,) = [list(corpus.eval_batches("validation", Config.of(seq=4, batch=2)).gather())]
    assert sum(batch["weights"].sum() for batch in whole) == 4 + 4
    for wrong in (f"{a}=0,{b}=1", f"{a}=-1", f"{a}=x,{b}", f"{a},{a}"):
        with pytest.raises(UsageError, match=r"data takes SOURCE or|names a source twice|does not exist"):
            load(wrong)


def test_ids_beside_a_text_need_the_tokenizer_they_came_from(tmp_path):
    ids = write(tmp_path / "a.bin", np.arange(100) % 10)
    (tmp_path / "b.txt").write_text("Ten letters, more or less. " * 40)
    for tokenizer in ("auto", "chars", "bpe:300"):
        with pytest.raises(UsageError, match=r"is made from text, and data=.*a\.bin holds token ids; give the .*with$"):
            load(f"{ids},{tmp_path / 'b.txt'}", tokenizer=tokenizer)
    assert len(load(f"{ids},{tmp_path / 'b.txt'}", tokenizer="bytes").sources) == 2


def npy(shape: str) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"123", "has 3 bytes, an odd number"),
        ("a.bin", b"", "nothing to train on"),
        ("a.npy", b"", r"a\.npy is truncated or not a \.npy file"),
        ("a.npy", b"\x93NUMPY\x01\x00", r"a\.npy is truncated or not a \.npy file"),
        ("a.npy", np.zeros(3), r"holds float64 of shape \(3,\); expected one axis of integers"),
        ("a.npy", np.zeros((3, 3), int), r"holds int64 of shape \(3, 3\)"),
        ("a.npy", np.array([1, -1, 2] * 20), r"holds negative ids \(-1\)"),
        *(("a.npy", npy(shape), "is truncated or not") for shape in ("(9" + 30 * "9" + ",)", "(True,)", "(-1,)", "{")),
        ("a.npy", np.array([1, 2**40] * 20), "holds the id 1099511627776, which no vocabulary has"),
        ("a.npy", np.array([{}, []], object), r"a\.npy is truncated or not"),
    ],
)
def test_wrong_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(UsageError, match=message):
        load(path)


def test_a_truncated_npy(tmp_path):
    path = write(tmp_path / "a.npy", np.arange(1000))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"a\.npy is truncated"):
        load(path)


def test_ids_beyond_the_vocabulary(tmp_path):
    path = write(tmp_path / "a.bin", np.arange(1000))
    with pytest.raises(UsageError, match=r"a\.bin holds the id 999, beyond a vocabulary of 257"):
        load(path, tokenizer="bytes")
    with pytest.raises(UsageError, match=r"tokenizer=chars is made from text, and data=.*a\.bin holds token ids"):
        load(path, tokenizer="chars")


def test_fingerprints_of_large_files_see_changes(tmp_path):
    path = tmp_path / "a.bin"
    for content in (bytes(1000), bytes(100_000)):
        found = set()
        for changed in (content, b"x" + content[1:], content[:-1] + b"x", content + b"\0"):
            path.write_bytes(changed)
            found.add(tokens.fingerprint_file(path, block=64, blocks=16))
        assert len(found) == 4
