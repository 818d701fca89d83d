"""Data that changes on the disk is noticed: prepared folders, the cache, sources, and two processes at one folder."""

import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardformer import Config, data
from shardformer.data import corpus, digests, file_sources, prepare
from shardformer.data.recipe import Recipe, split_of_text
from shardformer.data.source import SourceOptions
from shardformer.data.token_folder import TokenFolder
from shardformer.data.vocabulary import Bytes, Characters
from shardformer.errors import RunError, UsageError
from tests.surroundings import before_call, change_text_limits
from tests.waiting import PATIENCE

DOCUMENTS = [f"document {n}: {'word ' * (n % 7)}é\n" for n in range(300)]
PROMPTS = [{"prompt": f"Q{n}? ", "completion": f"A{n}!"} for n in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_records(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path: Path, texts=DOCUMENTS) -> Path:
    return write_records(path, [{"text": text} for text in texts])


def find_recipe(path: Path, **changes) -> Recipe:
    return dataclasses.replace(file_sources.find_recipe([str(path)], SourceOptions()), **changes)


def load(name, **options):
    return data.load_corpus(Config.of(data=str(name), seq=4, batch=2, tokenizer="bytes"), **options)


def change_one_byte(path: Path) -> None:
    """Changes a byte and keeps the size and the modification time, as `cp -p` and `rsync -t` do."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def folder(tmp_path):
    return prepare.prepare(
        find_recipe(write_records(tmp_path / "q.jsonl", PROMPTS * 8)), Bytes(), tmp_path / "tokens"
    ).path


@pytest.mark.parametrize("file", ["part_00000.train.bin", "train.ends.npy", "train.prompts.npy", "validation.ends.npy"])
def test_changed_prepared_data_is_damaged(folder, file):
    TokenFolder.open(folder).check_contents()
    change_one_byte(folder / file)
    with pytest.raises(RunError, match=r"is damaged"):
        TokenFolder.open(folder).check_contents(remembered=True)


def test_changed_data_ends_training_at_its_next_batch(folder):
    change_one_byte(folder / "part_00000.train.bin")
    corpus = load(folder)
    with pytest.raises(RunError, match=r"part_00000\.train\.bin is damaged: it has the sha256"):
        corpus.checks[0].wait()
    with pytest.raises(RunError, match=r"part_00000\.train\.bin is damaged"):
        next(corpus.train_batches(Config.of(seq=4, batch=2)))
    with pytest.raises(RunError, match=r"part_00000\.train\.bin is damaged"):
        corpus.eval_batches("validation", Config.of(seq=4, batch=2))


def test_a_resume_reads_all_data_before_it_starts(folder, monkeypatch):
    corpus = load(folder)
    corpus.checks[0].wait()
    change_one_byte(folder / "part_00000.train.bin")
    monkeypatch.setattr(digests, "stamp_file", lambda path: [1, 2, 3])  # a file system that hides every change
    with pytest.raises(RunError, match=r"part_00000\.train\.bin is damaged"):
        load(folder, resumes=True)


def test_sound_data_passes_the_check(folder):
    corpus = load(folder)
    corpus.checks[0].wait()
    assert next(corpus.train_batches(Config.of(seq=4, batch=2)))["tokens"].shape == (2, 4)
    assert load(folder, resumes=True).checks == ()


def test_a_changed_cache_is_damaged(tmp_path, cache):
    path = write_texts(tmp_path / "a.jsonl")
    load(path).checks[0].wait()
    (part,) = cache.glob("*/part_00000.train.bin")
    change_one_byte(part)
    with pytest.raises(RunError, match=r"part_00000\.train\.bin is damaged"):
        load(path).checks[0].wait()


def test_a_source_that_changes_with_its_times_is_other_data(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["word " * 30] * 80 + DOCUMENTS)
    before = load(path)
    content, kept = path.read_text(), path.stat()
    path.write_text(content.replace("word word", "ward word", 1))
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert path.stat().st_size == kept.st_size
    assert load(path).fingerprint != before.fingerprint


def test_a_touched_source_is_not_prepared_again(tmp_path, cache):
    path = write_texts(tmp_path / "a.jsonl")
    before = load(path)
    os.utime(path)
    assert load(path).fingerprint == before.fingerprint
    assert len(list(cache.glob("a-*"))) == 1


def test_digests_are_remembered_until_a_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    (first,) = digests.digest_files([path], settled=-1.0)
    read = []

    def count(opened):
        if opened == path:  # a thread of an earlier test may still read its files
            read.append(opened)

    before_call(monkeypatch, digests, "open_regular", count)
    assert digests.digest_files([path]) == [first]
    assert not read
    change_one_byte(path)
    assert digests.digest_files([path]) != [first]
    assert digests.digest_files([path], remembered=False) != [first]
    assert len(read) == 2


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path, cache):
    (tmp_path / "x").write_bytes(b"abc")
    digests.digest_files([tmp_path / "x"])
    assert not list(cache.glob("digests/*"))


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"x": 5}', b"\xff", b"[" * 10**5])
def test_a_damaged_memory_of_digests_is_ignored(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    (expected,) = digests.digest_files([path], settled=-1.0)
    (memory,) = (tmp_path / "cache" / "digests").iterdir()
    memory.write_bytes(content)
    assert digests.digest_files([path]) == [expected]


def test_moved_prompt_borders_are_other_data(tmp_path):
    """The tokens are equal: only the border between prompt and completion moves."""
    moved = [{"prompt": r["prompt"][:-1], "completion": " " + r["completion"]} for r in PROMPTS]
    found = [
        prepare.prepare(find_recipe(write_records(tmp_path / f"{n}.jsonl", records)), Bytes(), tmp_path / f"out{n}")
        for n, records in enumerate([PROMPTS, moved])
    ]
    assert found[0].index["splits"] == found[1].index["splits"]
    assert found[0].fingerprint != found[1].fingerprint


def test_two_processes_at_one_folder_do_not_share_data(tmp_path, monkeypatch):
    """The second process waits for the first, and detects that its folder contains different text."""
    mine, other = write_texts(tmp_path / "a.jsonl"), write_texts(tmp_path / "b.jsonl", DOCUMENTS[:50])
    started, released = threading.Event(), threading.Event()

    def wait_in_the_lock(*_):
        started.set()
        released.wait(PATIENCE)

    before_call(monkeypatch, prepare, "_write_part", wait_in_the_lock)
    first = threading.Thread(target=prepare.prepare, args=(find_recipe(mine), Bytes(), tmp_path / "out"))
    first.start()
    assert started.wait(PATIENCE)
    results = []

    def prepare_second(recipe, vocabulary):
        try:
            results.append(prepare.prepare(recipe, vocabulary, tmp_path / "out"))
        except UsageError as error:
            results.append(error)

    text = "".join(sorted(set("".join(DOCUMENTS))))
    others = [(find_recipe(other), Bytes()), (find_recipe(mine), Characters(text)), (find_recipe(mine), Bytes())]
    waiting = [threading.Thread(target=prepare_second, args=given) for given in others]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)  # most of them wait for the lock by now; a later one finds the same folder
    released.set()
    for thread in [first, *waiting]:
        thread.join(PATIENCE)
    refused = [found for found in results if isinstance(found, UsageError)]
    assert len(refused) == 2
    assert all("was prepared by another process meanwhile" in str(error) for error in refused)
    (same,) = (found for found in results if not isinstance(found, UsageError))
    assert [source["path"] for source in same.index["sources"]] == [str(mine)]


def test_near_copies_of_a_document_join_one_split():
    texts = [f"The {n}th text stands here.\nIt ends here." for n in range(2000)]
    for change in (
        lambda text: text + "  \n",
        lambda text: text.replace(" ", "  "),
        lambda text: text.upper(),
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: text.replace(".", "!"),
    ):
        assert all(split_of_text(change(text), 0.1) == split_of_text(text, 0.1) for text in texts)
    chosen = [split_of_text(text, 0.1) for text in texts]
    assert all(150 <= chosen.count(split) <= 250 for split in ("validation", "test"))


def test_texts_without_words_are_shared_out():
    chosen = [split_of_text("!" * n, 0.2) for n in range(1, 500)]
    assert all(60 <= chosen.count(split) <= 140 for split in ("validation", "test"))


def test_a_mixture_of_prepared_data_has_their_mark(tmp_path):
    np.arange(200, dtype="<u2").tofile(tmp_path / "x.bin")
    assert load(tmp_path / "x.bin").fingerprint[:2] != "2-"
    assert load(f"{write_texts(tmp_path / 'a.jsonl')}=3,{tmp_path / 'x.bin'}").fingerprint[:2] == "2-"


def test_bpe_learns_from_training_documents_only(tmp_path):
    texts = [f"{n} qqqq" for n in range(400)]
    held = [text if split_of_text(text, 0.05) == "train" else text.replace("qqqq", "zzzz") for text in texts]
    path = write_texts(tmp_path / "a.jsonl", held)
    recipe = find_recipe(path)
    sample = "".join(file_sources.TextFiles(recipe).sample())
    splits = {text: split_of_text(text, 0.05) for text in held}
    assert sample == "".join(text for text in held if splits[text] == "train")
    assert 300 < sum(split == "train" for split in splits.values()) < 400


def test_bpe_learns_from_the_training_part_of_one_long_text(tmp_path, monkeypatch):
    change_text_limits(monkeypatch, in_memory=1000)
    (tmp_path / "a.txt").write_text("train me\n" * 950 + "held out\n" * 50)
    source = corpus.find_source(str(tmp_path / "a.txt"), SourceOptions())
    assert isinstance(source, file_sources.TextFiles)
    assert set("".join(source.sample())) == set("train me\n")
    assert source.characters("test") == set("held out\n")
