"""Characters to ids and back, and what happens to a stranger."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.data import Vocabulary, check_same_data
from shardformer.errors import RunError, UsageError

OF_DATA = {"source": "builtin", "fingerprint": "f" * 64}


@settings(deadline=None)  # a busy machine is not a failure
@given(st.text(min_size=1))
def test_decode_inverts_encode(text):
    vocabulary = Vocabulary.from_text(text)
    ids = vocabulary.encode(text)
    assert ids.dtype == np.int32
    assert len(vocabulary) == len(set(text)) == len(np.unique(ids))
    assert vocabulary.decode(ids) == text


def test_ids_are_places_among_the_sorted_characters():
    assert Vocabulary.from_text("banana").encode("nab").tolist() == [2, 0, 1]


def test_empty_text():
    assert Vocabulary.from_text("a").encode("").shape == (0,)
    assert Vocabulary.from_text("a").decode([]) == ""


@pytest.mark.parametrize("stranger", ["é", "\U0001f600", "\udcff", "\t", "A", "z"])
def test_stranger_is_named_with_its_position(stranger):
    with pytest.raises(UsageError) as caught:
        Vocabulary.from_text("bcd\n").encode(f"bc\ncd{stranger}b{stranger}", source="prompt")
    message = str(caught.value)
    assert message.startswith("prompt: ")
    for part in (repr(stranger), f"U+{ord(stranger):04X}", "index 5", "line 2, column 3"):
        assert part in message


def test_all_strangers_are_named_up_to_a_dozen():
    with pytest.raises(UsageError) as caught:
        Vocabulary.from_text("ab").encode("(a_b(")
    assert str(caught.value).endswith("of the train split (2 are not: '(' '_'); replace them, or choose another text")
    with pytest.raises(UsageError) as caught:
        Vocabulary.from_text(" ").encode("the quick brown fox jumps")
    assert "(19 are not: 'b' 'c' 'e' 'f' 'h' 'i' 'j' 'k' 'm' 'n' 'o' 'p' ...)" in str(caught.value)


def test_a_run_is_named_as_the_one_that_knows_the_characters(tmp_path):
    (tmp_path / "vocabulary.json").write_text(Vocabulary.from_text("ab").document(**OF_DATA))
    read, _ = Vocabulary.load(tmp_path)
    with pytest.raises(UsageError) as caught:
        read.encode("c", source="train split of other.txt")
    assert str(caught.value) == (
        "train split of other.txt: character 'c' (U+0063) at index 0 (line 1, column 1) is not among the 2 characters "
        f"of {tmp_path}; replace it, or choose another text"
    )


@pytest.mark.parametrize("ids", [[-1], [0, 3]])
def test_decode_refuses_other_ids(ids):
    with pytest.raises(ValueError, match=r"0\.\.2"):
        Vocabulary("abc").decode(ids)


@pytest.mark.parametrize("characters", ["ba", "aab", ""])
def test_characters_are_sorted_and_distinct(characters):
    with pytest.raises(ValueError, match="sorted, distinct"):
        Vocabulary(characters)


def test_of_an_empty_text():
    with pytest.raises(UsageError, match="empty"):
        Vocabulary.from_text("")


def test_file_round_trip(tmp_path):
    vocabulary = Vocabulary.from_text("ab\né\udcff😀")
    (tmp_path / "vocabulary.json").write_text(vocabulary.document(**OF_DATA))
    assert Vocabulary.load(tmp_path) == (vocabulary, OF_DATA["fingerprint"])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '"abc"', "\xff", *(json.dumps({"characters": bad, **OF_DATA}) for bad in ("ba", "aa", ""))],
)
def test_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "vocabulary.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match="damaged") as caught:
        Vocabulary.load(tmp_path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RunError, match=r"vocabulary\.json"):
        Vocabulary.load(tmp_path)


def test_same_data(tmp_path):
    (tmp_path / "vocabulary.json").write_text(Vocabulary("ab").document(**OF_DATA))
    check_same_data(tmp_path, **OF_DATA)
    with pytest.raises(UsageError, match=r"other.*builtin"):
        check_same_data(tmp_path, source="other", fingerprint="0" * 64)
