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
        ("[f.g-h()]", {}), ("f(a=1)\n", {"a": 1}),
        ("[f(a=+1, b=.5, c=1_000, d=-1_0.2_5e1_0, e=1., f=+.5e-1)]", {"a": 1, "b": 0.5, "c": 1000, "d": -10.25e10,
                                                                     "e": 1.0, "f": 0.05}),
        ("[f(a='\\x41\\U0001F600\\a\\v', b='a\\\nb', c='\\xg')]", {"a": "A😀\a\v", "b": "ab", "c": "\\xg"}),
        ("[f(a=1__0)]", None), ("[f(a=_1)]", None), ("[f(a=.)]", None), ("[f(a='\\U00110000')]", None),
        ("[f(a='\\UFFFFFFFF')]", None), ("[f(a='\\U0010FFFF')]", {"a": "\U0010ffff"}),
        ("[f(1)]", None), ("[f(a=1 b=2)]", None), ("[f(a=x)]", None), ("[f()] and", None), ("f() g()", None),
        ("f", None),
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
