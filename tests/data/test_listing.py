"""The text files that a path, a folder or a pattern names, and the files that are left out."""

import os
from pathlib import Path

import numpy as np
import pytest

from shardformer import Config, data
from shardformer.data import corpus, file_sources, listing
from shardformer.data.source import SourceOptions
from shardformer.errors import UsageError
from tests.surroundings import let_fail

TEXT = "ab" * 100


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))


def write(path: Path, content: str | bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def list_names(name, path=None, out=None) -> list[str]:
    base = Path(path or name)
    found = listing.list_files(str(name), base, out, "data takes")
    return [file.name for file in found]


def test_the_run_folder_is_no_part_of_its_data(tmp_path):
    """Before the run has written anything, while it trains, and after it has ended."""
    texts = tmp_path / "texts"
    write(texts / "a.txt")
    out = texts / "run"
    config = Config.of(data=str(texts), out=str(out), seq=4, batch=2)
    before = data.load_corpus(config).fingerprint
    write(out / "metrics.csv", "step,loss\n1,2\n" * 50)
    assert data.load_corpus(config).fingerprint == before
    write(out / "config.json", "{}" * 90)
    write(out / "vocabulary.json", "{}" * 90)
    write(out / "step_5" / "config.json", "{}" * 90)
    moved = config.replace(out=str(tmp_path / "elsewhere"))
    assert data.load_corpus(moved).fingerprint == before


def test_prepared_folders_below_a_folder_are_left_out(tmp_path, said):
    write(tmp_path / "texts" / "a.txt")
    write(tmp_path / "texts" / "tokens" / "vocabulary.json", "{}")
    write(tmp_path / "texts" / "tokens" / "README.md")
    assert list_names(tmp_path / "texts") == ["a.txt"]
    assert said == [f"data={tmp_path / 'texts'}: left out: 2 files of runs or prepared data"]


def test_a_pattern_leaves_files_of_runs_out(tmp_path, said):
    write(tmp_path / "a.txt")
    write(tmp_path / "run" / "vocabulary.json", "{}")
    write(tmp_path / "run" / "notes.txt")
    assert list_names(tmp_path / "**" / "*.txt") == ["a.txt"]
    assert "left out: 1 file in folders of runs" in said[0]
    assert list_names(tmp_path / "run" / "*.txt") == ["notes.txt"]  # the run's folder is named
    with pytest.raises(UsageError, match="names only files of runs"):
        list_names(tmp_path / "r*" / "*.txt")


def test_other_files_of_a_folder_are_counted(tmp_path, said):
    for name in ("a.txt", "b.md", "c.png", "d.PNG", "e.wav", "LICENSE"):
        write(tmp_path / "texts" / name)
    assert list_names(tmp_path / "texts") == ["a.txt", "b.md"]
    (line,) = said
    assert line.startswith(f"data={tmp_path / 'texts'}: 2 text files; left out: 2 .png, 1 ")
    assert "1 .wav" in line
    assert "1 no suffix" in line


def test_check_of_sources_prints_nothing_that_reading_repeats(tmp_path, said):
    for name in ("a.txt", "c.png"):
        write(tmp_path / "texts" / name)
    config = Config.of(data=str(tmp_path / "texts"), seq=4, batch=2)
    corpus.check_sources(config)
    assert not said
    data.load_corpus(config)
    assert [line for line in said if "left out: 1 .png" in line]


def test_a_data_set_of_feather_files_is_rejected(tmp_path):
    write(tmp_path / "hub" / "README.md")
    write(tmp_path / "hub" / "data" / "train-0.feather", b"FEA1")
    write(tmp_path / "hub" / "data" / "train-1.feather", b"FEA1")
    with pytest.raises(
        UsageError, match=r"has 2 \.feather files, which are not read here; write their text as \.jsonl"
    ):
        corpus.find_source(str(tmp_path / "hub"), SourceOptions())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.feather", r"x\.feather is a table, which is not read here; write its text as \.parquet or \.jsonl"),
        ("x.orc", r"x\.orc is a table"),
        ("x.parquet", r"x\.parquet cannot be read as a table"),
        ("x.arrow", r"x\.arrow cannot be read as a table"),
        ("x.zip", r"x\.zip is packed in a way that is not read here; unpack it"),
        ("x.txt.xz", r"x\.txt\.xz is packed in a way"),
        ("x.bin", r"x\.bin holds token ids, not text; train on it as it is"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path, name, message):
    write(tmp_path / name, b"\xff\xfe")
    with pytest.raises(UsageError, match=message):
        file_sources.find_recipe([str(tmp_path / name)], SourceOptions())


def test_a_pattern_over_links_to_its_own_folder_ends(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for link in ("x", "y", "z"):
            (tmp_path / "texts" / name / link).symlink_to(tmp_path / "texts")
    (tmp_path / "texts" / "self").symlink_to(".")
    write(tmp_path / "texts" / "a" / "1.txt")
    write(tmp_path / "texts" / "2.txt")
    assert sorted(list_names(tmp_path / "texts" / "**" / "*.txt")) == ["1.txt", "2.txt"]
    assert sorted(list_names(tmp_path / "texts" / "**")) == ["1.txt", "2.txt"]
    assert sorted(list_names(tmp_path / "texts" / "**" / "a" / "**" / "*.txt")) == ["1.txt", "2.txt"]  # through links


def test_a_pattern_follows_links_to_other_folders(tmp_path):
    write(tmp_path / "elsewhere" / "1.txt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "elsewhere")
    assert list_names(tmp_path / "texts" / "**" / "*.txt") == ["1.txt"]


def test_a_relative_pattern_is_that_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("src/a.py", "src/x/b.py", "src/.hidden/c.py", "d.py"):
        write(tmp_path / name)
    assert list_names("src/**/*.py", "src/**/*.py") == ["a.py", "b.py"]
    assert list_names("**/*.py", "**/*.py") == ["d.py", "a.py", "b.py"]
    assert list_names("src/*.py", "src/*.py") == ["a.py"]


def test_all_files_that_are_not_utf8_are_named_first(tmp_path, monkeypatch):
    for number in range(5):
        write(tmp_path / "texts" / f"{number}.txt", TEXT.encode() + (b"\xff" if number % 2 else b""))
    source = corpus.find_source(str(tmp_path / "texts"), SourceOptions())
    let_fail(monkeypatch, os, "rename", AssertionError("nothing is prepared"))
    with pytest.raises(UsageError, match=r"2 of 5 files are not UTF-8: .*1\.txt, .*3\.txt; convert them"):
        data.load_corpus(Config.of(data=str(tmp_path / "texts"), seq=4, batch=2))
    assert isinstance(source, file_sources.TextFiles)
    assert not (tmp_path / "cache").exists()


def test_ids_of_a_token_file_are_not_text(tmp_path):
    np.arange(500, dtype="<u2").tofile(tmp_path / "a.bin")
    assert corpus.find_source(str(tmp_path / "a.bin"), SourceOptions()).largest_id() == 499
