"""Texts of tests: their sequences of words are found in other documents, and nothing else is."""

import json
import random

import numpy as np
import pytest

from shardformer.data import known_texts
from shardformer.data.known_texts import KnownTexts, list_known
from shardformer.data.word_hashes import hash_words
from shardformer.errors import UsageError

NAMES = [f"w{n}" for n in range(3000)]


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(NAMES, k=count))


def find(known: KnownTexts, texts: list[str]) -> set[int]:
    """Returns the documents that contain known words."""
    hashed = hash_words([text.encode() for text in texts])
    return set(hashed.documents[known.find(hashed)[0]].tolist())


def write(path, content: str):
    path.write_text(content)
    return path


def test_thirteen_words_in_a_row_are_found(tmp_path):
    text = words(0, 200)
    known = KnownTexts([write(tmp_path / "test.txt", text)])
    parts = text.split()
    around = words(1, 60)
    for start in range(0, 187, 17):
        assert find(known, [around, f"{around} {' '.join(parts[start : start + 13])}, {around}"]) == {1}
        assert find(known, [f"{around} {' '.join(parts[start : start + 12])} {around}"]) == set()


def test_case_and_punctuation_make_no_difference(tmp_path):
    known = KnownTexts([write(tmp_path / "test.txt", "What is the name of the third planet, as seen from the sun?")])
    assert find(known, ["Q: WHAT IS THE NAME of the\nthird planet -- as seen from the 'sun'? A: earth"]) == {0}


def test_short_texts_are_found_as_a_whole(tmp_path):
    texts = {count: words(count, count) for count in range(6, 13)}
    path = write(tmp_path / "test.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    known = KnownTexts([path])
    for count, text in texts.items():
        assert find(known, [f"{words(90, 30)} {text} {words(91, 30)}"]) == (set() if count < 8 else {0})
        assert find(known, [f"{words(90, 30)} {text.rpartition(' ')[0]}"]) == set()


def test_every_text_of_a_record_is_known(tmp_path):
    texts = [words(n, 20) for n in range(4)]
    record = {"question": texts[0], "choices": [texts[1], {"text": texts[2]}], "answer": 3, "none": None}
    path = write(tmp_path / "test.jsonl", json.dumps(record) + "\n" + json.dumps([texts[3]]) + "\n")
    assert find(KnownTexts([path]), [*texts, words(9, 20)]) == {0, 1, 2, 3}


def test_sequences_do_not_cross_documents(tmp_path):
    first, second = words(0, 12), words(1, 12)
    known = KnownTexts([write(tmp_path / "test.txt", f"{first} {second}")])
    assert find(known, [first, second]) == set()
    assert find(known, [f"{first} {second}"]) == {0}


def test_collision_in_the_table_is_not_found(tmp_path):
    """The table alone would find documents whose hash begins as a known one."""
    known = KnownTexts([write(tmp_path / "test.txt", words(0, 20))])
    for length, (hashes, table, shift) in known._tables.items():
        known._tables[length] = hashes, np.ones_like(table), shift
    assert find(known, [words(1, 100)]) == set()
    assert find(known, [words(1, 100), words(0, 20)]) == {1}


def test_positions_ascend_with_their_lengths(tmp_path):
    path = write(tmp_path / "test.jsonl", "".join(json.dumps(words(n, n)) + "\n" for n in (13, 8, 10)))
    text = " ".join([words(10, 10), "between", words(8, 8), words(13, 13), words(8, 8)])
    positions, lengths = KnownTexts([path]).find(hash_words([text.encode()]))
    assert positions.tolist() == [0, 11, 19, 32]
    assert lengths.tolist() == [10, 8, 13, 8]


def test_batches_make_no_difference(tmp_path, monkeypatch):
    path = write(tmp_path / "test.jsonl", "".join(json.dumps({"text": words(n, 20)}) + "\n" for n in range(30)))
    monkeypatch.setattr(known_texts, "BATCH", 200)
    assert find(KnownTexts([path]), [words(n, 20) for n in range(40)]) == set(range(30))


def test_files_are_listed_by_commas_and_globs(tmp_path):
    for name in ("a.txt", "b.txt", "c.jsonl"):
        write(tmp_path / name, "{}")
    assert [file.name for file in list_known(f"{tmp_path}/c.jsonl,{tmp_path}/*.txt")] == ["c.jsonl", "a.txt", "b.txt"]
    with pytest.raises(UsageError, match=r"^against=.*nowhere\.txt does not exist; against takes text files"):
        list_known(f"{tmp_path}/nowhere.txt")


@pytest.mark.parametrize("names", ["{},", ",", ",{}", "{},,{}"])
def test_empty_name_is_not_the_current_folder(tmp_path, names):
    path = write(tmp_path / "a.jsonl", "{}")
    with pytest.raises(UsageError, match=r"against=.* has an empty name between its commas"):
        list_known(names.format(path, path))


def test_lines_of_a_plain_file_are_texts(tmp_path):
    questions = [words(n, n) for n in (10, 11, 7, 9)]
    known = KnownTexts([write(tmp_path / "questions.txt", "\n".join(questions) + "\n")])
    around = words(90, 30)
    assert find(known, [f"{around} {question} {around}" for question in questions]) == {0, 1, 3}
    assert find(known, [f"{around} {question.rpartition(' ')[0]} {around}" for question in questions]) == set()


def test_files_without_text_are_rejected(tmp_path):
    path = write(tmp_path / "test.txt", "only seven words are in this text")
    with pytest.raises(UsageError, match=r"against=.*test.txt has no text of 8 words; name test files"):
        KnownTexts([path])
