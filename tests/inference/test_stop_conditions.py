"""A text ends before a stop string or the id that separates documents, and neither is shown."""

import pytest

from shardformer.data.vocabulary import Bytes, Characters
from shardformer.inference.sampling import Stops

END = Bytes.end_of_text


def ids(text):
    return list(text.encode())


@pytest.mark.parametrize(
    ("written", "strings", "ended", "text"),
    [
        (ids("abc"), ["x"], False, "abc"),
        (ids("abc"), ["bc"], True, "a"),
        (ids("abc"), ["c", "b"], True, "a"),
        (ids("abcd" + 20 * "e"), ["b"], False, "a"),  # long before the last ids: it ended then
        (ids("ab\u00e9"), ["\u00e9"], True, "ab"),
        ([*ids("ab"), END], [], True, "ab"),
        ([*ids("ab"), END], ["b"], True, "a"),
        ([END], [], True, ""),
        (ids("ab"), [""], False, "ab"),
    ],
)
def test_a_text_ends_before_its_stop(written, strings, ended, text):
    stops = Stops(Bytes(), strings)
    assert stops(written) == ended
    assert stops.cut(written) == text


def test_no_ends_ignore_the_end_of_text():
    stops = Stops(Bytes(), ends=())
    assert not stops([97, END])
    assert stops.cut([97, END, 98]) == "ab"


def test_a_vocabulary_without_an_end_stops_nothing():
    assert not Stops(Characters("ab"))([0, 1])


def test_any_of_several_ends_stops_a_text():
    stops = Stops(Bytes(), ends=(7, 9))
    assert stops([97, 9])
    assert stops.cut([97, 9]) == "a"
    assert not stops([97, END])


class EmptyTokens(Bytes):
    """Bytes whose id 0 has no text, as special tokens have none."""

    def decode(self, ids) -> str:
        return super().decode([id for id in ids if id])


@pytest.mark.parametrize(("empty", "ended"), [(8, True), (9, False)])
def test_stop_string_may_hold_eight_extra_tokens(empty, ended):
    stops = Stops(EmptyTokens(), ["ab"])
    assert stops([97, *[0] * empty, 98]) == ended
