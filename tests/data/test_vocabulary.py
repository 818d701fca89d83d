"""Characters to ids and back, and what happens to a unknown."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardformer.data import Characters, check_same_data, load_vocabulary
from shardformer.data.vocabulary import Bytes, TokenIds
from shardformer.errors import RunError, UsageError

OF_DATA = {"source": "builtin", "fingerprint": "f" * 64}


@pytest.mark.slow
@settings(deadline=None)  # a busy machine is not a failure
@given(st.text(min_size=1))
def test_decode_inverts_encode(text):
    vocabulary = Characters.from_text(text)
    ids = vocabulary.encode(text)
    assert ids.dtype == np.int32
    assert len(vocabulary) == len(set(text)) == len(np.unique(ids))
    assert vocabulary.decode(ids) == text


def test_ids_are_places_among_the_sorted_characters():
    assert Characters.from_text("banana").encode("nab").tolist() == [2, 0, 1]


def test_empty_text():
    assert Characters.from_text("a").encode("").shape == (0,)
    assert Characters.from_text("a").decode([]) == ""


@pytest.mark.parametrize("unknown", ["é", "\U0001f600", "\udcff", "\t", "A", "z"])
def test_an_unknown_character_is_named_with_its_position(unknown):
    with pytest.raises(UsageError) as caught:
        Characters.from_text("bcd\n").encode(f"bc\ncd{unknown}b{unknown}", source="prompt")
    message = str(caught.value)
    assert message.startswith("prompt: ")
    for part in (repr(unknown), f"U+{ord(unknown):04X}", "index 5", "line 2, column 3"):
        assert part in message


def test_all_unknown_characters_are_named_up_to_a_dozen():
    with pytest.raises(UsageError) as caught:
        Characters.from_text("ab").encode("(a_b(")
    assert str(caught.value).endswith(
        "of the corpus (2 are not: '(' '_'); replace them, choose another text, or train with tokenizer=bytes, "
        "which knows every character"
    )
    with pytest.raises(UsageError) as caught:
        Characters.from_text(" ").encode("the quick brown fox jumps")
    assert "(19 are not: 'b' 'c' 'e' 'f' 'h' 'i' 'j' 'k' 'm' 'n' 'o' 'p' ...)" in str(caught.value)


def test_a_run_is_named_as_the_one_that_knows_the_characters(tmp_path):
    (tmp_path / "vocabulary.json").write_text(Characters.from_text("ab").documents(**OF_DATA)["vocabulary.json"])
    read, _ = load_vocabulary(tmp_path)
    with pytest.raises(UsageError) as caught:
        read.encode("c", source="train split of other.txt")
    assert str(caught.value) == (
        "train split of other.txt: character 'c' (U+0063) at index 0 (line 1, column 1) is not among the 2 characters "
        f"of {tmp_path}; replace it, choose another text, or train with tokenizer=bytes, which knows every character"
    )


@pytest.mark.parametrize("ids", [[-1], [0, 3]])
def test_decode_refuses_other_ids(ids):
    with pytest.raises(ValueError, match=r"0\.\.2"):
        Characters("abc").decode(ids)


@pytest.mark.parametrize("characters", ["ba", "aab", ""])
def test_characters_are_sorted_and_distinct(characters):
    with pytest.raises(ValueError, match="sorted, distinct"):
        Characters(characters)


def test_of_an_empty_text():
    with pytest.raises(UsageError, match="empty"):
        Characters.from_text("")


def test_file_round_trip(tmp_path):
    vocabulary = Characters.from_text("ab\né\udcff😀")
    (tmp_path / "vocabulary.json").write_text(vocabulary.documents(**OF_DATA)["vocabulary.json"])
    assert load_vocabulary(tmp_path) == (vocabulary, OF_DATA["fingerprint"])


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '"abc"', "\xff"),
        *(json.dumps({"characters": bad, **OF_DATA}) for bad in ("ba", "aa", "", ["a", "b"], {"a": 1}, 5)),
        *(json.dumps({"tokenizer": "ids", "size": bad, **OF_DATA}) for bad in (math.inf, -1, 0, 10**30, "5", True)),
    ],
)
def test_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "vocabulary.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match="damaged") as caught:
        load_vocabulary(tmp_path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RunError, match=r"vocabulary\.json"):
        load_vocabulary(tmp_path)


def test_same_data(tmp_path):
    (tmp_path / "vocabulary.json").write_text(Characters("ab").documents(**OF_DATA)["vocabulary.json"])
    check_same_data(tmp_path, **OF_DATA)
    with pytest.raises(UsageError, match=r"other.*builtin"):
        check_same_data(tmp_path, source="other", fingerprint="0" * 64)
    with pytest.raises(
        UsageError, match="what the file holds or validation= has changed; bring the old data"
    ) as caught:
        check_same_data(tmp_path, source=OF_DATA["source"], fingerprint="0" * 64)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.text())
def test_bytes_know_every_text(text):
    vocabulary = Bytes()
    ids = vocabulary.encode(text)
    assert ids.tolist() == list(text.encode("utf-8", "surrogatepass"))
    assert vocabulary.decode(ids) == text
    assert "".join(vocabulary.decode_stream(ids.tolist())) == text
    assert vocabulary.byte_lengths()[ids].sum() == len(text.encode("utf-8", "surrogatepass"))


def test_bytes_are_decoded_in_whole_characters():
    pieces = list(Bytes().decode_stream("é€😀".encode()))
    assert [piece for piece in pieces if piece] == ["é", "€", "😀"]
    assert Bytes().decode([0xE2, 0x82, 256, 65]) == "\ufffdA"  # what was cut off shows, and harms nothing after it


@pytest.mark.parametrize("vocabulary", [Bytes(), TokenIds(7), Characters("ab"), Characters("\nab")])
def test_a_text_without_a_prompt_begins_with_a_token(vocabulary):
    first = vocabulary.first_ids()
    assert first.size == 1
    assert 0 <= first[0] < len(vocabulary)


def test_a_beginning_is_the_prompt_of_a_text_without_one():
    class BytesAfterEnd(Bytes):
        beginning = (256,)

    assert BytesAfterEnd().first_ids().tolist() == [256]


def test_only_a_template_of_one_id_has_a_first_id():
    class AfterOne(Bytes):
        template = (5,)

    class AfterTwo(Bytes):
        template = (5, 6)

    assert [vocabulary.first_id for vocabulary in (Bytes(), AfterOne(), AfterTwo())] == [None, 5, None]


def test_an_end_of_text_has_no_bytes():
    assert Bytes().decode_without_special_tokens([65, 256, 66]) == "AB"
    assert Bytes().byte_lengths()[256] == 0
    assert Bytes().decode([65, 0xE2, 0x82]) == "A\ufffd"  # a text that ends within a character


def test_every_vocabulary_has_a_digest_of_its_own():
    every = [Bytes(), TokenIds(7), TokenIds(8), Characters("ab"), Characters("ac"), Characters("abc")]
    assert len({vocabulary.sha256 for vocabulary in every}) == len(every)


def test_numbers_are_their_own_text():
    vocabulary = TokenIds(50257)
    assert vocabulary.encode("464 2068\n7").tolist() == [464, 2068, 7]
    assert vocabulary.decode([464, 2068, 7]) == "".join(vocabulary.decode_stream([464, 2068, 7])) == "464 2068 7"
    for wrong in ("50257", "-1", "abc", "9" * 30):
        with pytest.raises(UsageError, match=r"prompt: .*0\.\.50256"):
            vocabulary.encode(wrong, source="prompt")


@pytest.mark.parametrize("vocabulary", [Bytes(), TokenIds(7)])
def test_those_without_characters_are_kept_too(tmp_path, vocabulary):
    for name, text in vocabulary.documents(**OF_DATA).items():
        (tmp_path / name).write_text(text)
    assert load_vocabulary(tmp_path) == (vocabulary, OF_DATA["fingerprint"])
    assert vocabulary.sha256 != Characters("ab").sha256


def test_a_file_of_an_older_version_opens(tmp_path):
    (tmp_path / "vocabulary.json").write_text('{"characters": "ab", "source": "builtin", "fingerprint": "f"}')
    assert load_vocabulary(tmp_path) == (Characters("ab"), "f")


def test_a_model_that_has_seen_no_data_takes_any(tmp_path):
    (tmp_path / "vocabulary.json").write_text(Bytes().documents(source="", fingerprint="")["vocabulary.json"])
    check_same_data(tmp_path, source="anything", fingerprint="0" * 64)


def test_a_pipe_is_no_vocabulary(tmp_path):
    os.mkfifo(tmp_path / "vocabulary.json")
    with pytest.raises(RunError, match="It is a pipe or a device"):
        load_vocabulary(tmp_path)


def test_characters_have_the_bytes_of_utf8():
    assert Characters.from_text("😀€éa").byte_lengths().tolist() == [1, 2, 3, 4]
