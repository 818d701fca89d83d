"""Text files become token files: complete, in order, restartable; errors name the invalid file."""

import contextlib
import functools
import gzip
import itertools
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
import zstandard

from shardformer import Config, data, files
from shardformer.data import builtin, corpus, file_sources, hf_tokenizer, prepare, text_files
from shardformer.data.source import SourceOptions
from shardformer.data.token_folder import TokenFolder
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import Bytes, Characters, TokenIds
from shardformer.errors import RunError, UsageError
from tests.surroundings import change_expansion, change_text_limits, let_fail

DOCUMENTS = [f"document {n}: {'word ' * (n % 7)}é\n" for n in range(300)]


def make(names, out, vocabulary=None, progress=lambda *_: None, **options):
    found = file_sources.find_recipe([str(name) for name in names], SourceOptions(**options), with_ids=True)
    return prepare.prepare(found, vocabulary or Bytes(), out, progress)


def documents(folder: TokenFolder, split: str) -> list[str]:
    found = folder.split(split)
    starts = np.concatenate([[0], found.ends[:-1]])
    texts = [folder.vocabulary.decode(found.tokens.take(a, b - a - 1)) for a, b in zip(starts, found.ends, strict=True)]
    assert all(found.tokens.take(end - 1, 1)[0] == Bytes.end_of_text for end in found.ends)
    return texts


def write_jsonl(path, records):
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        half = len(content) // 2  # as two frames, as tools that append write them
        content = b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_documents_are_shared_out_by_hash(tmp_path, name):
    path = write_jsonl(tmp_path / name, [{"body": text} for text in DOCUMENTS])
    folder = make([path], tmp_path / "out", field="body")
    found = {split: documents(folder, split) for split in SPLITS}
    assert sorted(itertools.chain(*found.values())) == sorted(DOCUMENTS)
    assert all(5 <= len(found[split]) <= 30 for split in ("validation", "test"))
    # A document's split does not depend on the other documents or on its position.
    again = make([write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in DOCUMENTS[::-2]])], tmp_path / "again")
    assert all(set(documents(again, split)) <= set(found[split]) for split in SPLITS)
    assert found["train"] == [text for text in DOCUMENTS if text in found["train"]]  # in their order


def test_a_folder_of_files(tmp_path):
    for number, text in enumerate(DOCUMENTS[:60]):
        (tmp_path / "src" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / str(number % 3) / f"{number}.py").write_text(text)
    (tmp_path / "src" / "picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / "src" / ".git").mkdir()
    (tmp_path / "src" / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "src" / "empty.md").write_text("")
    folder = make([tmp_path / "src"], tmp_path / "out")
    assert sorted(itertools.chain(*(documents(folder, split) for split in SPLITS))) == sorted(["", *DOCUMENTS[:60]])
    assert sum(source["tokens"] for source in folder.index["sources"]) == len("".join(DOCUMENTS[:60]).encode())
    assert make([tmp_path / "src" / "**" / "*.py"], tmp_path / "globbed").index["splits"]["train"]["documents"] > 40


@pytest.fixture(scope="module")
def bpe():
    return hf_tokenizer.train_bpe([builtin.text()[:50_000]], 300)


def test_a_long_text_is_cut_without_changing_a_token(tmp_path, monkeypatch, bpe):
    change_text_limits(monkeypatch, range=5000, look_ahead=2000, piece=500)
    text = builtin.text()[:60_000] + "é" * 9000 + "x" * 9000  # without a line break for longer than it looks
    (tmp_path / "long.txt").write_text(text)
    folder = make([tmp_path / "long.txt"], tmp_path / "out", bpe)
    parts = [folder.split(split) for split in SPLITS]
    assert all(part.ends is None for part in parts)
    assert len(parts[0].tokens.parts) > 10
    texts = [bpe.decode(part.tokens.take(0, len(part.tokens))) for part in parts]
    assert "".join(texts) == text
    assert len(texts[0].encode()) == pytest.approx(0.9 * len(text.encode()), abs=2500)
    alike = parts[0].tokens.take(0, 15_000)
    assert np.array_equal(alike, bpe.encode(text[:60_000])[:15_000])
    assert sum(len(part.text) for r in text_files.divide_file(tmp_path / "long.txt", len(text.encode()))
               for part in text_files.read_pieces(r, "text")) == len(text)  # fmt: skip


def test_a_text_equals_itself_packed(tmp_path):
    text = "".join(DOCUMENTS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    folder = make([tmp_path / "a.txt.gz"], tmp_path / "out", named_validation=True)
    assert documents(folder, "train") == [text]


def test_prompts_are_kept_apart(tmp_path):
    records = [{"prompt": f"Q{n}? ", "completion": f"A{n}!"} for n in range(40)]
    folder = make([write_jsonl(tmp_path / "a.jsonl", records)], tmp_path / "out", named_validation=True)
    assert documents(folder, "train") == [f"Q{n}? A{n}!" for n in range(40)]
    assert folder.split("train").prompts.tolist() == [len(f"Q{n}? ") for n in range(40)]


def write_ids(path, ids):
    np.save(path, ids) if path.suffix == ".npy" else ids.astype("<u2").tofile(path)
    return path


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_a_prepared_token_file_trains_as_the_file_itself(tmp_path, monkeypatch, name):
    change_text_limits(monkeypatch, ids=70)
    path = write_ids(tmp_path / name, np.arange(1003) * 7 % 600)
    folder = make([path], tmp_path / "out", TokenIds(600))
    assert len(folder.index["splits"]["train"]["parts"]) == 13

    def read(source):
        config = Config.of(data=str(source), seq=8, batch=4)
        corpus = data.load_corpus(config)
        splits = [split.tokens.take(0, len(split.tokens)) for name in SPLITS for split in corpus.splits(name)]
        return [*splits, next(corpus.train_batches(config))["tokens"]]

    for prepared, direct in zip(read(folder.path), read(path), strict=True):
        np.testing.assert_array_equal(prepared, direct)


def test_texts_and_token_files_make_one_folder(tmp_path):
    """A token file's ids are copied as they are; each split ends a document where its part of the file ends."""
    texts = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    first, second = write_ids(tmp_path / "b.bin", np.arange(200)), write_ids(tmp_path / "c.npy", np.arange(100)[::-1])
    folder = make([first, texts, second], tmp_path / "out", share=0.1)
    only_texts = make([texts], tmp_path / "texts", share=0.1)
    for split, of_first, of_second in (
        ("train", np.arange(160), np.arange(99, 19, -1)),
        ("validation", np.arange(160, 180), np.arange(19, 9, -1)),
        ("test", np.arange(180, 200), np.arange(9, -1, -1)),
    ):
        found, before = folder.split(split), only_texts.split(split)
        start = len(before.tokens)
        np.testing.assert_array_equal(found.tokens.take(0, start), before.tokens.take(0, start))
        np.testing.assert_array_equal(found.tokens.take(start, len(found.tokens) - start), [*of_first, *of_second])
        borders = [start + len(of_first), start + len(of_first) + len(of_second)]
        np.testing.assert_array_equal(found.ends, [*before.ends, *borders])
    counts = {os.path.basename(source["path"]): source["tokens"] for source in folder.index["sources"]}
    assert counts == {"a.jsonl": len("".join(DOCUMENTS).encode()), "b.bin": 200, "c.npy": 100}
    assert sum(folder.index["splits"][split]["bytes"] for split in SPLITS) == counts["a.jsonl"] + 300


def test_a_token_file_that_changes_is_another_source(tmp_path):
    path = write_ids(tmp_path / "a.bin", np.arange(200))
    first = file_sources.find_recipe([str(path)], SourceOptions(), with_ids=True).identity()
    write_ids(path, np.arange(200)[::-1])
    assert file_sources.find_recipe([str(path)], SourceOptions(), with_ids=True).identity() != first


@contextlib.contextmanager
def replace_parts(act):
    """Calls `act(write_part, item, number, ...)` for each part that is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_write_part", functools.partial(act, prepare._write_part))
        yield


def test_killed_and_started_again(tmp_path, monkeypatch):
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": text} for text in DOCUMENTS[number::4]])
    change_text_limits(monkeypatch, range=1000)
    names = [tmp_path / f"{number}.jsonl" for number in range(4)]
    whole = make(names, tmp_path / "whole")
    written = []

    def killed(write_part, item, number, *rest):
        written.append(number)
        if len(written) == 3:
            raise KeyboardInterrupt
        return write_part(item, number, *rest)

    with replace_parts(killed), pytest.raises(KeyboardInterrupt):
        make(names, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (hidden,) = tmp_path.glob(".out.preparing-*")
    kept = {path.name: path.stat().st_mtime_ns for path in hidden.glob("part_*.json")}
    assert kept
    calls = []
    folder = make(names, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert not list(tmp_path.glob(".out.preparing-*"))
    assert calls[-1][0] == calls[-1][1] > 0
    assert folder.fingerprint == whole.fingerprint
    assert folder.index["splits"] == whole.index["splits"]


def test_killed_while_the_index_is_written(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "alone"}])  # its other two splits are empty
    with monkeypatch.context() as patch:
        let_fail(patch, np, "save", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make([path], tmp_path / "out")
    folder = make([path], tmp_path / "out", named_validation=False)
    assert sum(split["documents"] for split in folder.index["splits"].values()) == 1


def test_killed_write_leaves_nothing_in_the_finished_folder(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    replace = os.replace
    monkeypatch.setattr(files.Path, "unlink", lambda *_, **__: None)  # a killed process cleans up nothing
    let_fail(monkeypatch, os, "replace", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make([path], tmp_path / "out")
    monkeypatch.undo()
    assert os.replace is replace
    assert list(tmp_path.glob(".out.preparing-*/.*.tmp-*"))
    make([path], tmp_path / "out")
    assert list((tmp_path / "out").glob(".*")) == []


def test_a_full_disk_is_reported_and_the_next_start_goes_on(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    with monkeypatch.context() as patch:
        let_fail(patch, prepare._PartWriter, "write", OSError(28, "No space left on device"))
        with pytest.raises(RunError, match=r"cannot write .*\.out\.preparing-.*: No space left on device; the same"):
            make([path], tmp_path / "out")
    assert sum(len(documents(make([path], tmp_path / "out"), split)) for split in SPLITS) == len(DOCUMENTS)


def test_a_source_that_changes_meanwhile(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])

    def changed(write_part, *given):
        report = write_part(*given)
        write_jsonl(path, [{"text": "other"}])
        return report

    with replace_parts(changed), pytest.raises(UsageError, match="has changed while it was prepared"):
        make([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_under_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])

    def opened():
        return corpus.find_source(str(path), SourceOptions()).open(Bytes(), lambda *_: None)

    first = opened()
    assert opened().fingerprint == first.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 1
    write_jsonl(path, [{"text": text} for text in DOCUMENTS[1:]])
    assert opened().fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\nnot json\n', r"a\.jsonl, line 2, is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', r"has no text under 'text' \(it has: body\); name the field: text=NAME"),
        ("a.jsonl", b'["a"]\n', r"line 1, has no text under 'text' \(it has: list\)"),
        ("a.jsonl", b'{"text": 7}\n', r"line 1, has a text of int; expected text"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"line 1, is not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-20], r"jsonl\.gz is truncated or not packed by gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:10] + b"\xff" * 90, r"not packed by gzip"),
        ("a.txt.gz", gzip.compress("word é".encode()[:-1] * 9), r"a\.txt\.gz is not UTF-8"),
        ("a.txt.gz", gzip.compress("word é".encode()[:-1]), r"a\.txt\.gz is not UTF-8: unexpected end of data"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz is truncated or not packed by gzip"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 99)[:-3], r"a\.jsonl\.zst is truncated"),
        ("a.jsonl.zst", b"not zstd", r"a\.jsonl\.zst is damaged or not packed by zstd"),
        ("a.txt.gz", gzip.compress(b"ab" * 25_000_000), r"a\.txt\.gz grows more than 20 times when it is unpacked"),
        ("a.jsonl.zst", zstandard.compress(bytes(50_000_000)), r"grows more than 20 times|line 1, has more than"),
        ("a.jsonl", b'{"text": "' + b"a" * 2_000_000 + b'"}\n', r"a\.jsonl, line 1, has more than 1,000,000 bytes"),
        ("a.txt", b"ab\xffcd" * 99, r"a\.txt is not UTF-8: invalid start byte \(0xFF\) at byte"),
    ],
)  # fmt: skip
def test_wrong_texts_are_named_and_leave_nothing(tmp_path, monkeypatch, name, content, message):
    change_text_limits(monkeypatch, line=1_000_000)
    change_expansion(monkeypatch, most=20)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        make([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_files_without_text_are_rejected(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(UsageError, match="has no text"):
        make([tmp_path / name], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {name}


def test_a_line_of_many_megabytes_is_one_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * 2_000_000}, {"text": ""}])
    folder = make([path], tmp_path / "out", named_validation=True)
    assert folder.split("train").ends.tolist() == [10_000_001, 10_000_002]


@pytest.fixture
def folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    return make([path], tmp_path / "folder").path


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("part_00000.train.bin", lambda data: data[:-1], r"train\.bin is [\d,]+ bytes long, expected"),
        ("part_00000.train.bin", None, r"train\.bin is missing"),
        ("index.json", lambda data: data[:-20], r"index\.json is damaged"),
        (
            "index.json",
            lambda data: data.replace(b'"format": 2', b'"format": 9'),
            "format 9, this version reads 2",
        ),
        ("index.json", lambda data: b"[]", r"index\.json is damaged"),
        ("index.json", lambda data: b"[" * 10**5, r"index\.json is damaged"),
        ("index.json", lambda data: data.replace(b'"splits": {', b'"splits": {}, "_": {'), r"index\.json is damaged"),
        ("index.json", lambda data: data.replace(b'"sources": [', b'"sources": 5, "_": ['), r"index\.json is damaged"),
        ("index.json", lambda data: data.replace(b'"parts": [', b'"parts": 5, "_": ['), r"index\.json is damaged"),
        ("index.json", lambda data: data.replace(b"part_00000.train", b"../part_00000.train"), "splits/train/parts"),
        ("index.json", lambda data: data.replace(b"part_00000.train", b"x" * 9000), "splits/train/parts"),
        ("index.json", lambda data: data.replace(b'"prompts": false', b'"prompts": 5'), "has_documents or prompts"),
        ("train.ends.npy", lambda data: data.replace(b"<i8", b"<f8"), r"train\.ends\.npy is damaged"),
        ("train.ends.npy", lambda data: data[:-8], r"train\.ends\.npy is damaged"),
        ("vocabulary.json", lambda data: b"{}", r"vocabulary\.json is damaged"),
    ],
)
def test_damage_is_named(folder, file, damage, message):
    if damage:
        (folder / file).write_bytes(damage((folder / file).read_bytes()))
    else:
        (folder / file).unlink()
    with pytest.raises(RunError, match=message):
        TokenFolder.open(folder).splits()


def test_a_folder_brings_its_vocabulary(folder):
    source = corpus.find_source(str(folder), SourceOptions())
    assert source.vocabulary == Bytes()
    with pytest.raises(UsageError, match=r"was prepared with tokenizer=bytes .* and this takes chars"):
        source.open(Characters("ab"), lambda *_: None)
    shutil.move(folder, folder.with_name("moved"))
    moved = corpus.find_source(str(folder.with_name("moved")), SourceOptions())
    assert moved.open(Bytes(), lambda *_: None).fingerprint == source.folder.fingerprint


def test_a_name_that_is_no_unicode(tmp_path):
    """And the name of another folder, to which the new one's is a pattern."""
    path = write_jsonl(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), [{"text": text} for text in DOCUMENTS])
    (tmp_path / ".another.preparing-1").mkdir()
    assert make([path], tmp_path / "*").split("train").tokens
    assert (tmp_path / ".another.preparing-1").exists()


def test_a_lock_that_was_removed_is_not_held(tmp_path):
    """A process that waited locks the file that other processes can see, not the removed one."""
    path, inside = tmp_path / "lock", []

    def work():
        with files.locked(path):
            inside.append(path.exists())

    with files.locked(path):
        waiting = threading.Thread(target=work)
        waiting.start()
        time.sleep(0.1)
    waiting.join(60)
    assert inside == [True]
    assert not path.exists()


def test_unfinished_files_of_a_killed_start_are_removed(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"some words {n}"}) + "\n" for n in range(50)))
    found = file_sources.find_recipe([str(tmp_path / "a.jsonl")], SourceOptions())
    hidden = tmp_path / f".out.preparing-{found.identify_with(Bytes())[:12]}"
    hidden.mkdir()
    (hidden / ".index.json.tmp-0123456789abcdef.json").write_text("{")
    folder = prepare.prepare(found, Bytes(), tmp_path / "out")
    assert not list(folder.path.glob(".*"))


def test_linked_folder_in_the_making_is_rejected(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    (tmp_path / "kept").mkdir()
    found = file_sources.find_recipe([str(path)], SourceOptions())
    hidden = tmp_path / f".out.preparing-{found.identify_with(Bytes())[:12]}"
    hidden.symlink_to("kept")
    with pytest.raises(UsageError, match="is a link to kept, and nothing is written"):
        prepare.prepare(found, Bytes(), tmp_path / "out")
    assert not list((tmp_path / "kept").iterdir())
