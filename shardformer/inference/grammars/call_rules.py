"""The rules of tool calls as JSON: the name of a function, then arguments of its schema."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardformer.errors import UsageError
from shardformer.inference.grammars.grammar import Automaton, Rules, Symbol, spell
from shardformer.inference.grammars.json_rules import JSON
from shardformer.inference.grammars.json_schema import MOST_RULES, TooLarge, make_rules

# Next to these, type=object does not tell what the arguments are.
OTHER_ROOTS = {"$ref", "allOf", "anyOf", "const", "enum", "oneOf"}
NOTHING = {"type": "object", "additionalProperties": False, "properties": {}}


class Function(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None  # the schema of its arguments; None: it takes none
    is_strict: bool  # a schema that the rules do not cover is rejected; else any object may be its arguments

    @property
    def takes_objects(self) -> bool:
        """True if all values of the schema are certainly objects, as arguments are."""
        schema = self.parameters or {}
        return schema.get("type", "object") == "object" and not schema.keys() & OTHER_ROOTS


def make_call_rules(functions: Sequence[Function], arguments: str) -> Rules:
    """Returns the rules of {"name": ..., ARGUMENTS: {...}} for one of some functions; raises UsageError."""
    rules: Rules = {**JSON, "root": []}
    colon: tuple[Symbol, ...] = ("space", *spell(":"), "space")
    for number, function in enumerate(functions):
        start = f"{number}root"
        rules |= {f"{number}{name}": [tuple(_rename(symbol, number) for symbol in symbols) for symbols in alternatives]
                  for name, alternatives in _make_arguments(function, MOST_RULES - len(rules)).items()
                  if name not in JSON}  # fmt: skip
        name, key = (spell(json.dumps(text, ensure_ascii=False)) for text in (function.name, arguments))
        begin = ("space", *spell("{"), "space", *spell('"name"'), *colon, *name, "space", *spell(","), "space")
        rules["root"].append((*begin, *key, *colon, start, "space", *spell("}")))
    return rules


def _make_arguments(function: Function, most: int) -> Rules:
    schema = NOTHING if function.parameters is None else {"type": "object", **function.parameters}
    name = f"the parameters of tool {function.name:.60}"
    try:
        if not function.takes_objects:
            raise UsageError(f"{name} may be no object; give type=object, and without {', '.join(sorted(OTHER_ROOTS))}")
        rules = make_rules(schema, name, most)
    except TooLarge:
        raise UsageError(
            "tools have too large schemas; make them simpler, or name one function in tool_choice"
        ) from None
    except UsageError:
        if function.is_strict:
            raise
        return {"root": [("space", "object")]}
    if Automaton(rules).shortest is None:
        raise UsageError(f"{name} have no finite text; correct the schema")
    return rules


def _rename(symbol: Symbol, number: int) -> Symbol:
    """Returns a rule's name among those of all functions; the rules of JSON are shared."""
    return f"{number}{symbol}" if isinstance(symbol, str) and symbol not in JSON else symbol
