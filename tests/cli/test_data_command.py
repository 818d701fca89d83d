"""`data prepare`, `show` and `export`: texts there and back, and wrong words that touch nothing."""

import gzip
import hashlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.child_process import make_environment
from shardformer.cli import data_command
from shardformer.cli.loading import ShownProgress
from shardformer.data import Characters, builtin, file_sources, prepare, tfrecords
from shardformer.data.source import SourceOptions
from shardformer.data.token_folder import TokenFolder
from shardformer.data.vocabulary import Bytes
from tests.surroundings import change_text_limits, let_fail


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(80):
        (tmp_path / f"{number}.txt").write_text(builtin.text()[number * 500 :][:500])
    assert main(["data", "prepare", "*.txt", "out=tokens", "tokenizer=chars", "validation=0.1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"tokenised ([\d.]+ kB) of \1 in", printed)
    assert "tokens: tokenizer chars" in printed
    return TokenFolder.open(tmp_path / "tokens")


def test_what_is_shown(folder, capsys):
    assert main(["data", "show", "tokens"]) == 0
    printed = capsys.readouterr().out
    found = folder.index["splits"]
    assert sum(split["documents"] for split in found.values()) == 80
    assert f"{found['train']['tokens']:,}" in printed
    assert "... and 60 more" in printed
    assert builtin.text()[:50] in printed or "The train split begins:" in printed
    assert (folder.path / "lengths.png").stat().st_size > 1000


def test_a_folder_that_cannot_be_written_is_shown(folder, monkeypatch, capsys):
    let_fail(monkeypatch, data_command, "replacing", PermissionError(13, "Permission denied"))
    assert main(["data", "show", "tokens"]) == 0
    assert "tokens (lengths.png was not drawn: Permission denied)" in capsys.readouterr().out


@pytest.mark.slow
def test_exported_records_are_the_tokens(folder, tmp_path, capsys):
    assert main(["data", "export", "tokens", "out=x_9.tfrecords", "ids=101"]) == 0
    assert "records of 101 ids" in capsys.readouterr().out
    assert (tmp_path / "x_9.index").read_text() == "x_9.tfrecords\n"
    records = tfrecords.Records.open(tmp_path / "x_9.index")
    tokens = folder.split("train").tokens
    ids = np.concatenate([records.files[0].ids(number) for number in range(len(records.files[0]))])
    assert len(ids) == len(tokens) // 101 * 101
    assert np.array_equal(ids, tokens.take(0, len(ids)))
    assert isinstance(folder.vocabulary, Characters)


def test_a_folder_without_training_documents_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def chance(text: str) -> float:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64

    text = next(text for text in map(str, range(100)) if chance(text) < 0.4)
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert main(["data", "prepare", "one.txt.gz", "out=tokens", "tokenizer=bytes", "validation=0.4"]) == 0
    assert main(["data", "show", "tokens"]) == 0
    assert "The validation split begins:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("data takes: prepare SRC ... out=FOLDER", []),
        ("data takes: prepare SRC ... out=FOLDER", ["show"]),
        ("data takes: prepare SRC ... out=FOLDER", ["show", "a", "b"]),
        ("data prepare needs a folder to write: out=FOLDER", ["prepare", "*.txt"]),
        ("data prepare needs at least one text or token file", ["prepare", "out=new"]),
        ("out=tokens exists; name a folder that does not", ["prepare", "*.txt", "out=tokens"]),
        ("0.txt is named twice", ["prepare", "0.txt", "*.txt", "out=new"]),
        ("data=nowhere does not exist", ["prepare", "nowhere", "out=new"]),
        ("data prepare takes validation=SHARE or validation=none", ["prepare", "*.txt", "out=new", "validation=x.txt"]),
        ("tokenizer=bpe:N takes N from 257", ["prepare", "*.txt", "out=new", "tokenizer=bpe:many"]),
        ("validation is a share in (0, 0.5)", ["prepare", "*.txt", "out=new", "validation=0.7"]),
        ("dedup is one of none, exact, near; got 'all'", ["prepare", "*.txt", "out=new", "dedup=all"]),
        ("bad_rows is one of stop, skip; got 'go'", ["prepare", "*.txt", "out=new", "bad_rows=go"]),
        ("0.txt is one text; give .jsonl records", ["prepare", "0.txt", "out=new", "dedup=exact"]),
        (
            "against=nowhere does not exist; against takes text files",
            ["prepare", "*.txt", "out=new", "against=nowhere"],
        ),
        ("unknown key 'tokeniser'; did you mean 'tokenizer'?", ["prepare", "*.txt", "out=new", "tokeniser=chars"]),
        ("nowhere does not exist; expected a folder made by `data prepare`", ["show", "nowhere"]),
        (" is not a prepared folder: it has no index.json", ["export", ".", "out=x"]),
        ("data export needs a file to write: out=NAME_COUNT.tfrecords", ["export", "tokens", "out=x"]),
        ("tokens has no split 'dev'; there are train", ["export", "tokens", "out=x.tfrecords", "split=dev"]),
        ("fewer than one record of 2000000", ["export", "tokens", "out=x.tfrecords", "ids=2000000"]),
    ],
)
def test_wrong_words(folder, tmp_path, capsys, message, words):
    before = sorted(map(str, tmp_path.rglob("*")))
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_token_files_are_prepared_as_ids(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.arange(100, dtype="<u2").tofile("a.bin")
    np.save("b.npy", np.arange(40) + 500)
    assert main(["data", "prepare", "a.bin", "b.npy", "out=tokens"]) == 0
    assert "tokens: tokenizer ids, 540 entries" in capsys.readouterr().out
    assert main(["data", "show", "tokens"]) == 0
    assert "The train split begins:\n0 1 2 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("tokenizer=bpe:32768 is made from text, and data=", ["a.bin", "a.txt"]),  # by default
        ("a.bin holds token ids; give the tokenizer.json that they were made with\n", ["a.bin", "a.txt"]),
        ("tokenizer=chars is made from text, and data=", ["a.bin", "tokenizer=chars"]),
        ("beyond a vocabulary of 257; give the tokenizer that it was made", ["a.bin", "a.txt", "tokenizer=bytes"]),
        ("odd.bin has 3 bytes, an odd number", ["odd.bin"]),
        ("negative.npy holds negative ids (-5); token ids begin at 0", ["negative.npy", "tokenizer=bytes"]),
        ("empty.bin has no text", ["empty.bin"]),
    ],
)
def test_wrong_token_files_are_named(tmp_path, monkeypatch, capsys, message, words):
    monkeypatch.chdir(tmp_path)
    np.arange(1000, dtype="<u2").tofile("a.bin")
    np.save("negative.npy", np.arange(-5, 50))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "a.txt").write_text(builtin.text()[:5000])
    assert main(["data", "prepare", *words, "out=tokens"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()


def test_an_export_overwrites_nothing(folder, tmp_path, capsys):
    for name in ("x_9.tfrecords", "x_9.index"):
        (tmp_path / name).write_text("mine")
        assert main(["data", "export", "tokens", "out=x_9.tfrecords", "ids=101"]) == 2
        assert f"{name} exists; give another out=, or remove it" in capsys.readouterr().err
        assert [path.name for path in tmp_path.glob("x_9*")] == [name]
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_an_export_reads_all_checksums(folder, tmp_path, capsys):
    (part,) = folder.path.glob("*.train.bin")
    content = part.read_bytes()
    part.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert main(["data", "export", "tokens", "out=x_9.tfrecords", "ids=101"]) == 1
    assert "train.bin is damaged: it has the sha256" in capsys.readouterr().err
    assert not list(tmp_path.glob("x_9*"))


def test_an_id_beyond_the_vocabulary_is_named(folder, capsys):
    (part,) = folder.path.glob("*.train.bin")
    part.write_bytes(b"\xff" * part.stat().st_size)
    assert main(["data", "show", "tokens"]) == 1
    assert "holds the id 65535, beyond a vocabulary of" in capsys.readouterr().err


def test_control_sequences_of_a_text_are_shown_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "before \\u001b]0;owned\\u0007\\u009b31m \\u202e after\\ttab"}\n' * 20)
    assert main(["data", "prepare", "a.jsonl", "out=tokens", "tokenizer=bytes"]) == 0
    assert main(["data", "show", "tokens"]) == 0
    printed = capsys.readouterr().out
    assert "before \\x1b]0;owned\\x07\\x9b31m \\u202e after\ttab" in printed
    assert not set("\x1b\x07\x9b\u202e") & set(printed)


def test_a_pipe_is_not_imported(tmp_path, capsys):
    os.mkfifo(tmp_path / "input.txt")
    assert main(["data", "import", str(tmp_path / "input.txt")]) == 2
    assert "input.txt: It is a pipe or a device" in capsys.readouterr().err


def test_progress_of_a_packed_file_is_shown_as_it_is_read(tmp_path, monkeypatch):
    change_text_limits(monkeypatch, look_ahead=1 << 16)
    lines = "".join(f"{hashlib.sha256(str(n).encode()).hexdigest()}\n" for n in range(60_000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(lines.encode()))
    calls = []
    recipe = file_sources.find_recipe([str(tmp_path / "a.txt.gz")], SourceOptions())
    prepare.prepare(recipe, Bytes(), tmp_path / "out", lambda done, total: calls.append(done / total), 0.0)
    assert calls == sorted(calls)
    assert len([share for share in calls if 0.05 < share < 0.95]) >= 3
    assert calls[-1] == 1


def test_csv_is_read_as_text_with_a_notice(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + 'a,"b, c"\n' * 40)
    words = ["data", "prepare", str(tmp_path / "rows.csv"), f"out={tmp_path / 'tokens'}", "tokenizer=bytes"]
    assert main(words) == 0
    assert "1 .csv read as text, with its header, commas and quotes" in capsys.readouterr().out


def test_split_without_a_document_is_reported(tmp_path, capsys):
    for name in "ab":  # the splits are drawn by hash, and two documents cannot be in three
        (tmp_path / f"{name}.txt").write_text(name * 100)
    words = ["data", "prepare", str(tmp_path / "*.txt"), f"out={tmp_path / 'tokens'}", "tokenizer=bytes"]
    assert main(words) == 0
    assert "no document is in " in capsys.readouterr().out
    assert main([*words[:3], f"out={tmp_path / 'all'}", "tokenizer=bytes", "validation=none"]) == 0
    assert "no document is in " not in capsys.readouterr().out


def test_progress_is_shown_in_tenths_where_there_is_no_terminal(capsys):
    with ShownProgress() as progress:
        for done in range(101):
            progress.show(done * 10**6, 100 * 10**6)
    lines = capsys.readouterr().out.splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[-1].startswith("tokenised 100.00 MB of 100.00 MB")


def test_progress_of_two_passes_has_two_lines_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with ShownProgress("compared") as progress, ShownProgress("paired") as of_pairs:
        for each in (progress, of_pairs):
            for done in range(3):
                each.show(done * 10**6, 2 * 10**6)
    rows = [row.rpartition("\x1b[K")[2] for row in capsys.readouterr().out.split("\n")]
    assert rows == ["compared 2.00 MB of 2.00 MB in 0 s", "paired 2.00 MB of 2.00 MB in 0 s", ""]


def test_copies_and_texts_of_tests_are_left_out_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [builtin.text()[n * 500 :][:500] for n in range(12)]
    for number, text in enumerate([*texts, texts[3], texts[4] + " edited"]):
        (tmp_path / f"{number:02}.txt").write_text(text)
    (tmp_path / "tests.md").write_text(texts[7][100:300])
    words = ["prepare", "*.txt", "out=tokens", "tokenizer=bytes", "validation=none", "dedup=near", "against=tests.md"]
    assert main(["data", *words]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"compared ([\d.]+ kB) of \1 in .*\npaired 3.58 kB of 3.58 kB in ", printed)  # 14 x 32 x 8
    assert re.search(r"left out of 14 documents \(7.* kB\): 1 \(.*\) words of a test file, 1 \(.*\) equal", printed)
    assert re.search(
        r"near-copies of an earlier document: .*13.txt document 1 \(.*is like .*04.txt document 1", printed
    )
    assert TokenFolder.open(tmp_path / "tokens").index["splits"]["train"]["documents"] == 11
    assert main(["data", "show", "tokens"]) == 0
    assert "left out of 14 documents" in capsys.readouterr().out


def test_wrong_encoding_is_found_before_the_comparison(folder, capsys):
    (folder.path.parent / "bad.txt").write_bytes(b"ab\xff" * 9)
    words = ["data", "prepare", "0.txt", "bad.txt", "out=new", "dedup=exact", "against=nowhere"]
    assert main(words) == 2
    assert "1 of 2 files are not UTF-8" in capsys.readouterr().err


COMPARES = ("removal", "document_sketches", "near_copies", "known_texts", "word_hashes", "sketch_file")
PREPARE = """
import sys
from shardformer.__main__ import main
assert main(["data", "prepare", "0.txt", "out=out", "tokenizer=bytes", *sys.argv[1:]]) == 0
print(*(name for name in sys.modules if name.startswith("shardformer.data.")))
"""


@pytest.mark.parametrize("options", [[], ["1.txt", "dedup=exact"]])
def test_prepare_imports_no_comparison_that_is_off(folder, tmp_path, options):
    command = [sys.executable, "-c", PREPARE, *options]
    environment = make_environment()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    imported = {name.rpartition(".")[2] for name in done.stdout.splitlines()[-1].split()}
    assert set(COMPARES) & imported == (set(COMPARES) if options else set())
