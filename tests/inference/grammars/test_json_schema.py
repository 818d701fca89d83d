"""Texts of the rules parse and are valid, and what the rules do not cover is named."""

import inspect
import json
import sys

import pytest

from shardformer.errors import UsageError
from shardformer.inference.grammars.grammar import NEVER, Automaton
from shardformer.inference.grammars.json_rules import JSON, JSON_OBJECT
from shardformer.inference.grammars.json_schema import make_rules
from tests.inference.grammars.texts import draw_texts, is_text

VALUES = [{}, {"a": [1, 2.5, -3e-7, None, True, 'é😀\n\u2028\\"'], "b": {"c": {}, "": []}}]
# A schema, values of it, and values that are none.
SCHEMAS = [
    (True, [1, "a", None, {"b": [1]}], []),
    ({"type": "integer"}, [0, -12, 10**15], [1.5, "1", None]),
    ({"type": ["string", "null"]}, ["", "é", None], [1, True]),
    ({"enum": ["a", "ab", 1, None, {"b": 1}]}, ["a", "ab", 1, None, {"b": 1}], ["b", "abc", 11]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ({"const": 3}, [3], [4, "3"]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "é😀"], ["", "abc"]),
    ({"type": "array", "items": {"type": "boolean"}}, [[], [True, False]], [[1], True]),
    ({"minItems": 1, "maxItems": 2}, [[1], [1, "a"]], [[], [1, 2, 3]]),
    ({"maxItems": 0}, [[]], [[1]]),
    ({"type": "object"}, [{}, {"a": 1}], [[]]),
    ({"properties": {"a": {}, "b": {"type": "null"}}}, [{}, {"a": 1}, {"b": None}, {"a": 1, "b": None}],
     [{"b": 1}, {"c": 1}]),
    ({"properties": {"a": {}}, "required": ["a", "z"], "additionalProperties": False}, [], [{"a": 1}]),
    ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 1}], [{}, {"a": 1}]),
    ({"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     [{}, {"ab": None}, {"a": 1, "abc": 2, "": 3}, {"ab": None, "é": 1}], [{"ab": 1}, {"a": None}, {"ab": 1, "b": 1}]),
    ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}, [None, [], [[None], []]], [1, [1]]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, [None], [1]),
    ({"allOf": [{"type": "null"}]}, [None], [1]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": "b"}], [{}]),
    ({"properties": {"a": {}}, "required": ["z"]}, [{"z": 1}, {"a": 1, "z": None}], [{"a": 1}]),
    ({"enum": ["é", "è", "éé"]}, ["é", "è", "éé"], ["e", "éè"]),
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_written_json_is_accepted(options):
    assert all(is_text(JSON_OBJECT, json.dumps(value, **options)) for value in VALUES)


@pytest.mark.parametrize("text", ['{"a":}', "{,}", '{"a":01}', '{"a":1.}', '{"a":"\n"}', '{"a":"\\x"}', "[]", "{}}",
                                  '{"a":"\\ud800"}', "{'a':1}", '{"a":1,}', '{"a":NaN}'])  # fmt: skip
def test_other_texts_are_not(text):
    assert not is_text(JSON_OBJECT, text)


def test_every_text_parses():
    texts = draw_texts(JSON | {"root": [("object",)]}, 60)
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert max(map(len, texts)) > 50


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS)
def test_values_of_a_schema(schema, valid, invalid):
    rules = make_rules(schema)
    assert all(is_text(rules, json.dumps(value, ensure_ascii=False)) for value in valid)
    assert not any(is_text(rules, json.dumps(value)) for value in invalid)


def test_unsatisfiable_part_is_left_out():
    """`child` never ends, null does."""
    child = {"properties": {"child": {"$ref": "#/$defs/child"}}, "required": ["child"]}
    rules = make_rules({"anyOf": [{"$ref": "#/$defs/child"}, {"type": "null"}], "$defs": {"child": child}})
    assert is_text(rules, "null")
    assert draw_texts(rules, 3) != []
    automaton = Automaton(make_rules({"$ref": "#/$defs/child", "$defs": {"child": child}}))
    assert automaton.least[automaton.start] == NEVER


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a"}, "keyword 'pattern' at #"),
        ({"properties": {"a": {"minimum": 1}}}, "keyword 'minimum' at #/properties/a"),
        ({"type": "integer", "items": {}}, "keyword 'items'"),
        ({"oneOf": []}, "keyword 'oneOf'"),
        ({"type": "date"}, "type 'date'"),
        ({"type": 3}, "expected a name or a list"),
        ({"properties": 3}, "properties at # is 3; expected an object"),
        ({"properties": {"a": 3}}, "#/properties/a is 3; expected an object"),
        ({"required": [1]}, "expected names"),
        ({"$ref": "http://a"}, "expected a part of this schema"),
        ({"$ref": "#/b"}, "names no part"),
        ({"enum": []}, "no value"),
        ({"enum": [float("nan")]}, "cannot be written"),
        ({"properties": {"\ud800": {}}}, "half of a character"),
        ({"minItems": 2, "maxItems": 1}, "expected 0 to 1000"),
        ({"maxLength": 10**9}, "expected 0 to 1000"),
        ({"const": float("nan")}, "cannot be written"),
        ({"const": float("inf"), "enum": [1]}, "cannot be written"),
        ({"anyOf": [{"$ref": f"#/anyOf/{'1' * 5000}"}]}, "names no part"),
        ({"const": "a" * 200_000}, "200,002 bytes"),
        ({"enum": [f"{n}" * 900 for n in range(10)] * 2}, "expected at most 1,000 and 10,000"),
        ({"required": ["a" * 1000]}, "1,002 bytes"),
        ({"$ref": f"#/$defs/{'a' * 3000}", "$defs": {"a" * 3000: {}}}, "names are too long"),
    ],
)
def test_what_is_not_covered_is_named(schema, message):
    with pytest.raises(UsageError, match=message):
        make_rules(schema)


def test_too_deep_schema_is_rejected():
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nested too deeply"):
        make_rules(schema)


@pytest.fixture
def shallow():
    """Leaves room for 200 more nested calls."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    yield
    sys.setrecursionlimit(limit)


def test_long_names_of_objects_with_others(shallow):
    """The rules of other names are numbered, and made without a recursion for each letter."""
    names = [letter * 330 for letter in "abc"]
    rules = make_rules({"properties": {name: {"type": "null"} for name in names}, "additionalProperties": True})
    assert len(rules) < 1_220
    assert max(map(len, rules)) < 360
    assert is_text(rules, json.dumps({names[0]: None, names[0][1:]: 1, names[1] + "b": 1}))
    assert not is_text(rules, json.dumps({names[0]: None, names[1]: 1}))
