"""Calls that are written as Python are values of JSON, of bounded depth."""

import json

import pytest

from shardformer.inference.tool_calls.python_calls import DEEPEST, parse_python


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f()]", {}),
        ("[f(a='it\\'s', b=\"x\\ny\", c='\\u00e9\\d')]", {"a": "it's", "b": "x\ny", "c": "é\\d"}),
        ("[f(a=1, b=-2.5, c=1e3, d=True, e=null, g=false,)] ", {"a": 1, "b": -2.5, "c": 1000.0, "d": True, "e": None,
                                                                "g": False}),
        ("[f(a=[1, [2]], b={'x': {\"y\": []}, })]", {"a": [1, [2]], "b": {"x": {"y": []}}}),
        ("[ f . g ( ) ]", None),
        ("[f.g-h()]", {}),
        ("[f(1)]", None), ("[f(a=1 b=2)]", None), ("[f(a=x)]", None), ("[f()] and", None), ("f()", None),
        ("[f(]", None),
        ("[f(a={1: 2})]", None), ("[f(,)]", None), ("[f(a='x)]", None),
    ],
)  # fmt: skip
def test_arguments_are_values_of_json(text, arguments):
    if arguments is None:
        with pytest.raises(ValueError, match="expected"):
            parse_python(text)
    else:
        [call] = parse_python(text)
        assert json.loads(call.arguments) == arguments


def test_deep_values_are_rejected():
    nested = DEEPEST - 2  # in the lists of calls and of arguments
    assert parse_python(f"[f(a={'[' * nested}{']' * nested})]")
    with pytest.raises(ValueError, match="too deeply"):
        parse_python(f"[f(a={'[' * (nested + 1)}{']' * (nested + 1)})]")
