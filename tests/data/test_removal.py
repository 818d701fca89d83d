"""Copies and texts of tests are left out of a prepared corpus: the same ones whatever divides the work."""

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from shardformer.data import document_sketches, file_sources, near_copies, prepare, removal
from shardformer.data.known_texts import KnownTexts
from shardformer.data.removal import EQUAL, NEAR, TESTED, remove_documents
from shardformer.data.sketch_file import SketchFile
from shardformer.data.source import SourceOptions
from shardformer.data.text_files import FileRange, Piece
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import Bytes
from shardformer.errors import RunError, UsageError
from tests.surroundings import change_text_limits, let_fail

NAMES = [f"w{n}" for n in range(3000)]


def write_text(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(seed).choices(NAMES, k=count))


def edit(text: str, seed: int = 0) -> str:
    words, rng = text.split(), random.Random(seed)
    for position in rng.sample(range(len(words)), 3):
        words[position] = "edited"
    return " ".join(words)


def write_records(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path):
    """Two files of records: 40 texts, an equal copy and a near-copy of some, and texts with words of a test."""
    texts = [write_text(n) for n in range(40)]
    test = write_text(99, 30)
    write_records(tmp_path / "a.jsonl", [*texts[:20], texts[3], edit(texts[5]), f"{texts[20]} {test}"])
    write_records(tmp_path / "b.jsonl", [texts[7], *texts[21:], edit(texts[30]), edit(texts[3])])
    write_records(tmp_path / "test.jsonl", [test])
    return tmp_path


def remove(folder, dedup="near", against="test.jsonl", names=("a.jsonl", "b.jsonl"), **options):
    recipe = file_sources.find_recipe([str(folder / name) for name in names], SourceOptions(**options))
    known = str(folder / against) if against else ""
    return remove_documents(recipe, dedup, known, folder, lambda *_: None, lambda *_: None)


def numbers(recipe) -> dict[str, list[int]]:
    return {path.name: found.tolist() for path, found in recipe.removal.numbers.items()}


def texts_of(recipe) -> list[str]:
    ends = "".join(piece.text + "\0" * piece.ends for piece in recipe.pieces(*SPLITS))
    return ends.split("\0")[:-1]


@pytest.mark.parametrize(
    ("dedup", "against", "expected"),
    [
        ("exact", "", {"a.jsonl": [20], "b.jsonl": [0]}),
        ("near", "", {"a.jsonl": [20, 21], "b.jsonl": [0, 20, 21]}),
        ("none", "test.jsonl", {"a.jsonl": [22]}),
        ("near", "test.jsonl", {"a.jsonl": [20, 21, 22], "b.jsonl": [0, 20, 21]}),
    ],
)
def test_planted_documents_are_removed(corpus, dedup, against, expected):
    assert numbers(remove(corpus, dedup, against)) == expected


def test_search_that_finds_nothing_is_noticed(corpus, broken):
    broken(near_copies, "find_near", lambda *_: iter(()))
    assert numbers(remove(corpus, "near", "")) != {"a.jsonl": [20, 21], "b.jsonl": [0, 20, 21]}


def test_report_counts_and_names_what_went(corpus):
    report = remove(corpus).removal.report
    lines = [*(corpus / "a.jsonl").open(), *(corpus / "b.jsonl").open()]
    texts = [json.loads(line)["text"] for line in lines]
    assert (report["documents"], report["bytes"]) == (45, sum(map(len, texts)))
    reasons = report["reasons"]
    assert {reason: each["documents"] for reason, each in reasons.items()} == {TESTED: 1, EQUAL: 2, NEAR: 3}
    assert reasons[EQUAL]["bytes"] == len(texts[20]) + len(texts[23])
    assert reasons[TESTED]["examples"][0].startswith(f"{corpus / 'a.jsonl'} document 23 ({texts[22][:64]!r}) has '")
    assert reasons[TESTED]["examples"][0].endswith(f"{' '.join(write_text(99, 30).split()[:13])}'")
    assert reasons[EQUAL]["examples"][1] == (
        f"{corpus / 'b.jsonl'} document 1 ({texts[7][:64]!r}) is like {corpus / 'a.jsonl'} document 8 "
        f"({texts[7][:64]!r})"
    )
    assert len(reasons[NEAR]["examples"]) == 3


def test_prepared_folder_has_the_rest(corpus):
    recipe = remove(corpus)
    folder = prepare.prepare(recipe, Bytes(), corpus / "out")
    found = []
    for split in folder.splits().values():
        starts = itertools.chain([0], split.ends[:-1])
        found += [Bytes().decode(split.tokens.take(a, b - a - 1)) for a, b in zip(starts, split.ends, strict=True)]
    every = [json.loads(line)["text"] for name in ("a.jsonl", "b.jsonl") for line in (corpus / name).open()]
    gone = {20, 21, 22, 23, 43, 44}
    assert sorted(found) == sorted(text for n, text in enumerate(every) if n not in gone)
    assert sorted(texts_of(recipe)) == sorted(found)  # what a tokenizer is trained on
    assert folder.index["removed"] == recipe.removal.report


def test_folder_without_removal_says_nothing_of_it(corpus):
    recipe = file_sources.find_recipe([str(corpus / "a.jsonl")], SourceOptions())
    assert recipe.removal is None
    assert "removed" not in prepare.prepare(recipe, Bytes(), corpus / "out").index


def test_identity_depends_on_options_and_tests(corpus):
    plain = file_sources.find_recipe([str(corpus / n) for n in ("a.jsonl", "b.jsonl")], SourceOptions())
    recipes = [plain, remove(corpus), remove(corpus, "exact"), remove(corpus, against="")]
    write_records(corpus / "test.jsonl", [write_text(98)])
    assert len({recipe.identity() for recipe in [*recipes, remove(corpus)]}) == 5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [100, 1000])
def test_division_of_the_work_makes_no_difference(corpus, monkeypatch, threads, batch):
    expected = remove(corpus).removal
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    monkeypatch.setattr(document_sketches, "MOST_DOCUMENTS", max(batch // 200, 1))
    monkeypatch.setattr(document_sketches, "BATCH", 3 * batch)
    monkeypatch.setattr(near_copies, "MOST_KEYS", batch // 50)
    monkeypatch.setattr(near_copies, "MOST_PAIRS", 2)
    result = remove(corpus).removal
    assert result.identity == expected.identity
    assert result.report == expected.report
    assert {k: v.tolist() for k, v in result.numbers.items()} == {k: v.tolist() for k, v in expected.numbers.items()}


HASHED = """
import sys
from pathlib import Path
from tests.data import test_removal
found = test_removal.remove(Path(sys.argv[1])).removal
print(sorted((path.name, numbers.tolist()) for path, numbers in found.numbers.items()), found.report)
"""


@pytest.mark.slow
def test_hash_seed_makes_no_difference(corpus):
    command = [sys.executable, "-c", HASHED, str(corpus)]
    outputs = [subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
                              check=True).stdout for seed in ("1", "2")]  # fmt: skip
    assert outputs[0] == outputs[1] != ""


def test_long_document_is_compared_in_parts(tmp_path, monkeypatch):
    """A plain file of several ranges is one document, as is its packed copy."""
    lines = [write_text(n, 8) + "\n" for n in range(120)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("".join(lines[:60] + ["changed\n"] + lines[60:]))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (tmp_path / "d.txt").write_text("another text, much shorter")
    names = ("a.txt", "b.txt", "c.txt.gz", "d.txt")
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    monkeypatch.setattr(document_sketches, "BATCH", 700)
    assert numbers(remove(tmp_path, "exact", "", names)) == {"c.txt.gz": [0]}
    recipe = remove(tmp_path, "near", "", names)
    assert sorted(numbers(recipe)) == ["b.txt", "c.txt.gz"]
    assert recipe.removal.report["bytes"] == 3 * len("".join(lines)) + len("changed\n") + 26
    assert sorted(texts_of(recipe)) == sorted(["".join(lines), "another text, much shorter"])


def sketch(folder, known=None) -> np.ndarray:
    """Returns the columns of a.txt, next to a short b.txt: a single file would be one text, not documents."""
    file = SketchFile(folder, document_sketches.count_columns(is_near=True))
    recipe = file_sources.find_recipe([str(folder / name) for name in ("a.txt", "b.txt")], SourceOptions())
    document_sketches.sketch_documents(recipe, file, known, lambda *_: None)
    assert file.sort() == 2
    return file.gather(np.arange(file.columns), np.array([0]))[0]


def test_parts_of_a_document_share_the_words_around_borders(tmp_path, monkeypatch):
    lines = [write_text(n, 8) + "\n" for n in range(120)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("short")
    expected = sketch(tmp_path)
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    monkeypatch.setattr(document_sketches, "BATCH", 700)
    np.testing.assert_array_equal(sketch(tmp_path), expected)
    for first in range(118):  # 13 words around each end of a line
        words = " ".join(lines[first : first + 3]).split()
        write_records(tmp_path / "test.jsonl", [" ".join(words[2:15])])
        assert sketch(tmp_path, KnownTexts([tmp_path / "test.jsonl"]))[document_sketches.KNOWN] == 1


def test_long_documents_with_equal_ends_stay(tmp_path, monkeypatch):
    end = "".join(write_text(n, 8) + "\n" for n in range(40))
    for name, first in (("a.txt", 100), ("b.txt", 200)):
        (tmp_path / name).write_text("".join(write_text(first + n, 8) + "\n" for n in range(80)) + end)
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    monkeypatch.setattr(document_sketches, "BATCH", 700)
    assert numbers(remove(tmp_path, "near", "", ("a.txt", "b.txt"))) == {}


def test_words_in_the_last_part_of_a_long_document_are_found(tmp_path, monkeypatch):
    test = write_text(99, 30)
    (tmp_path / "a.txt").write_text("".join(write_text(n, 8) + "\n" for n in range(120)) + test + "\n")
    (tmp_path / "b.txt").write_text(write_text(5))
    write_records(tmp_path / "test.jsonl", [test])
    monkeypatch.setattr(document_sketches, "BATCH", 700)
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    assert numbers(remove(tmp_path, "near", names=("a.txt", "b.txt"))) == {"a.txt": [0]}


def test_copies_of_a_document_of_a_test_are_judged_by_themselves(tmp_path):
    """A document that is left out as a test's text is no reason to leave out another one."""
    text, test = write_text(0, 100), write_text(99, 13)
    write_records(tmp_path / "a.jsonl", [f"{text} {test}", text, text])
    write_records(tmp_path / "test.jsonl", [test])
    assert numbers(remove(tmp_path, names=("a.jsonl",))) == {"a.jsonl": [0, 2]}


def test_document_of_the_first_named_file_stays(tmp_path, monkeypatch):
    """Long plain files are divided, and small ones are read together."""
    text = "".join(write_text(n, 8) + "\n" for n in range(60))
    (tmp_path / "a.txt").write_text(text[:900])
    (tmp_path / "b.txt").write_text(text)
    write_records(tmp_path / "c.jsonl", [text[:900], text])
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    assert numbers(remove(tmp_path, "exact", "", ("a.txt", "c.jsonl", "b.txt"))) == {"c.jsonl": [0], "b.txt": [0]}


def test_examples_name_each_document_once(tmp_path, monkeypatch):
    test = write_text(99, 400)
    lines = [f"{line}\n" for line in (test[n : n + 200] for n in range(0, 1600, 200))]
    (tmp_path / "a.txt").write_text("".join(lines))
    write_records(tmp_path / "b.jsonl", [test, test, test, test, "other"])
    write_records(tmp_path / "test.jsonl", [test])
    monkeypatch.setattr(document_sketches, "BATCH", 700)
    change_text_limits(monkeypatch, range=1000, look_ahead=200, piece=300)
    examples = remove(tmp_path, "none", names=("a.txt", "b.jsonl")).removal.report["reasons"][TESTED]["examples"]
    assert [example.partition(" (")[0].rpartition("/")[2] for example in examples] == [
        "a.txt document 1", "b.jsonl document 1", "b.jsonl document 2"]  # fmt: skip


def test_corpus_of_which_nothing_stays_is_rejected(tmp_path):
    test = write_text(99, 30)
    write_records(tmp_path / "a.jsonl", [test, f"more {test}"])
    write_records(tmp_path / "test.jsonl", [test])
    with pytest.raises(UsageError, match=r"all 2 documents of .* are left out: 2 words of a test file; for example "):
        remove(tmp_path, names=("a.jsonl",))


def test_prompts_are_compared_too(tmp_path):
    records = [{"prompt": f"{write_text(n, 20)} ", "completion": write_text(50, 6)} for n in (0, 1, 0)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert numbers(remove(tmp_path, "near", "", ("a.jsonl",))) == {"a.jsonl": [2]}


def test_bad_rows_are_not_counted(tmp_path):
    text = write_text(0)
    write_records(tmp_path / "a.jsonl", [text, text])
    content = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text(content[0] + "not json\n" + content[1])
    with pytest.raises(UsageError, match="line 2, is not JSON"):
        remove(tmp_path, "exact", "", ("a.jsonl",))
    recipe = remove(tmp_path, "exact", "", ("a.jsonl",), skips_bad_rows=True)
    assert texts_of(recipe) == [text]


def test_ends_of_documents_decide_what_is_retained():
    pieces = [Piece("a", ends=False), Piece("a"), Piece("b"), Piece("c", ends=False), Piece("c"), Piece("d")]
    part = FileRange(file_sources.Path("x"), 0, 9, True)
    for removed in ([], [0], [1], [3], [0, 2], [0, 1, 2, 3]):
        found = removal.Removal("", [], {part.path: np.array(removed)}, {}).retain(part, iter(pieces))
        assert "".join(dict.fromkeys(piece.text for piece in found)) == "".join(
            each for n, each in enumerate("abcd") if n not in removed
        )


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(document_sketches, "BATCH", 1 << 16)
    monkeypatch.setattr(near_copies, "MOST_KEYS", 200)
    monkeypatch.setattr(near_copies, "MOST_PAIRS", 100)
    peaks = []
    for size in (500, 2000):
        write_records(tmp_path / "a.jsonl", [write_text(n % 400, 200) for n in range(size)])
        remove(tmp_path, "near", "", ("a.jsonl",))
        tracemalloc.start()
        remove(tmp_path, "near", "", ("a.jsonl",))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] + 100 * 1500  # the numbers of what is removed


def test_source_that_changes_after_the_comparison_is_rejected(corpus):
    recipe = remove(corpus)
    write_records(corpus / "b.jsonl", ["other"])
    with pytest.raises(UsageError, match="has changed while it was prepared"):
        prepare.prepare(recipe, Bytes(), corpus / "out")


def test_full_disk_is_reported(corpus, monkeypatch):
    let_fail(monkeypatch, document_sketches.SketchFile, "append", OSError(28, "No space left on device"))
    with pytest.raises(RunError, match=r"cannot write sketches of documents in .*: No space left on device"):
        remove(corpus)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "one text", r"a\.txt is one text; give \.jsonl records or several files"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "holds conversations or pairs; leave both out"),
        ("a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "holds conversations or pairs; leave both out"),
        ("a.bin", "\0\0\0\0", "holds token ids; leave both out"),
    ],
)
def test_what_has_no_documents_of_text_is_rejected(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    recipe = file_sources.find_recipe([str(tmp_path / name)], SourceOptions(), with_ids=True)
    with pytest.raises(UsageError, match=message):
        remove_documents(recipe, "near", "", tmp_path, lambda *_: None, lambda *_: None)
