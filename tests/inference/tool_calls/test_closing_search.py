"""The end of a call is found outside of strings, whatever the pieces in which the text comes, and without rereading."""

import pytest

from shardformer.inference.tool_calls.closing_search import ClosingSearch

TEXTS = [  # text before its first closing, quotes
    ("{}", '"'),
    ('{"a": "</c>"}', '"'),
    ('{"a": "\\\\"}', '"'),
    ('{"a": "\\"</c>", "b": "</c>"}', '"'),
    ('it\'s "a"', ""),
    ("'\"</c>' \"'</c>\"", "'\""),
    ("< </ </c </</", '"'),
]


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(("text", "quotes"), TEXTS)
def test_closing_is_found_outside_of_strings(text, quotes, step):
    search, whole = ClosingSearch("</c>", quotes), f"{text}</c> and </c>"
    found = [search.find(whole[: end + step]) for end in range(0, len(whole), step)]
    first = next(end for end in found if end >= 0)
    assert first == len(text) + len("</c>")


def test_text_is_not_read_again():
    search, text = ClosingSearch("</c>", '"'), '{"a": "'
    for letters in ("x" * 50, '", "b": ', "1</"):
        text += letters
        assert search.find(text) == -1
        assert len(text) - search._place < len("</c>")
