"""JSON schemas as rules: every text of the rules is valid; a keyword that they do not cover is rejected by name."""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from shardformer.errors import UsageError
from shardformer.inference.grammars.grammar import Rules, Symbol, spell
from shardformer.inference.grammars.json_rules import JSON, add_other_keys, add_texts

# They describe a value and restrict none.
NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
         "deprecated", "readOnly", "writeOnly"}  # fmt: skip
OF_TYPES: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "number": set(), "integer": set(), "boolean": set(), "null": set(),
}  # fmt: skip
PYTHON_TYPES = {"object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,),
                "boolean": (bool,), "null": (type(None),)}  # fmt: skip
MOST_RULES = 50_000
LONGEST_LOCATION = 2_000  # characters: the names of rules begin with them
LONGEST_TEXT, MOST_BYTES = 1_000, 10_000  # of a name or constant, and of all: an automaton has a state for each byte
MOST_REPEATS = 1_000  # of a bound of items or characters


class TooLarge(UsageError):
    """A schema has too many rules."""


def make_rules(schema: Any, name: str = "schema", most: int = MOST_RULES) -> Rules:
    """Returns the rules of the values of a schema, of which `root` is the start; raises UsageError."""
    maker = _Maker(schema, name, most)
    try:
        maker.rules["root"] = [("space", maker.add(schema, "#"))]
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply; make it simpler") from None
    return maker.rules


class _Maker:
    """Adds the rule of each part of a schema, named by the part's location; further ones have a ~ in their names."""

    def __init__(self, schema: Any, name: str, most: int):
        self.rules: Rules = dict(JSON)
        self._most = most
        self._schema, self._name = schema, name
        self._bytes = 0  # of names and constants

    def add(self, schema: Any, location: str) -> str:
        """Returns the name of the rule of a part; a recursive part is added once."""
        if location in self.rules:
            return location
        if len(self.rules) > self._most:
            raise TooLarge(f"{self._name} is too large; make it simpler")
        if len(location) > LONGEST_LOCATION:
            raise UsageError(f"{self._name} is nested too deeply at {location:.60}..., or its names are too long")
        self.rules[location] = []
        self.rules[location] += self._list_alternatives(schema, location)
        return location

    def _list_alternatives(self, schema: Any, location: str) -> Sequence[tuple[Symbol, ...]]:
        if schema is True or schema == {}:
            return [("value",)]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise UsageError(f"{self._name}: {location} is {schema!r:.60}; expected an object")
        if "$ref" in schema:
            self._check_keywords(schema, location, {"$ref"})
            return [(self._refer(schema["$ref"], location),)]
        if "allOf" in schema and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            self._check_keywords(schema, location, {"allOf"})
            return [(self.add(schema["allOf"][0], f"{location}/allOf/0"),)]
        if "anyOf" in schema:
            self._check_keywords(schema, location, {"anyOf"})
            parts = self._take(schema, "anyOf", list, location)
            return [(self.add(part, f"{location}/anyOf/{n}"),) for n, part in enumerate(parts)]
        types = self._read_types(schema, location)
        if "const" in schema or "enum" in schema:
            self._check_keywords(schema, location, {"const", "enum", "type"})
            return self._list_constants(schema, types, location)
        self._check_keywords(schema, location, {"type"}.union(*(OF_TYPES[kind] for kind in types)))
        makers = {"object": self._add_object, "array": self._add_array, "string": self._add_string}
        return [(makers[kind](schema, location) if kind in makers else kind,) for kind in types]

    def _check_keywords(self, schema: dict, location: str, known: set[str]) -> None:
        for keyword in schema.keys() - NOTES - known:
            raise UsageError(
                f"{self._name}: the keyword {keyword!r:.60} at {location:.200} is not supported here; leave it out"
            )

    def _take(self, schema: dict, keyword: str, kind: type, location: str, default: Any = None) -> Any:
        value = schema.get(keyword, default)
        if type(value) is not kind:
            raise UsageError(f"{self._name}: {keyword} at {location:.200} is {value!r:.60}; expected {_NAMES[kind]}")
        return value

    def _read_types(self, schema: dict, location: str) -> list[str]:
        """Returns the types of a schema; without `type`, the one that its keywords are for, else all."""
        types = schema.get("type")
        if types is None:
            types = [kind for kind, keywords in OF_TYPES.items() if keywords & schema.keys()][:1]
            types = types or [kind for kind in OF_TYPES if kind != "integer"]
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(isinstance(kind, str) for kind in types):
            raise UsageError(f"{self._name}: type at {location:.200} is {types!r:.60}; expected a name or a list")
        for kind in types:
            if kind not in OF_TYPES:
                raise UsageError(f"{self._name}: type {kind!r:.60} at {location:.200}; expected {', '.join(OF_TYPES)}")
        return list(dict.fromkeys(types))

    def _refer(self, reference: Any, location: str) -> str:
        part: Any = self._schema
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise UsageError(
                f"{self._name}: $ref at {location:.200} is {reference!r:.60}; expected a part of this schema, #/..."
            )
        target = "#"
        for word in reference.split("/")[1:]:
            word = unquote(word).replace("~1", "/").replace("~0", "~")
            target += f"/{_escape(word)}"
            if isinstance(part, list) and word.isdecimal() and len(word) < 8 and int(word) < len(part):
                part = part[int(word)]
            elif isinstance(part, dict) and word in part:
                part = part[word]
            else:
                raise UsageError(f"{self._name}: $ref {reference!r:.60} at {location:.200} names no part of the schema")
        return self.add(part, target)

    def _list_constants(self, schema: dict, types: list[str], location: str) -> Sequence[tuple[Symbol, ...]]:
        values = self._take(schema, "enum", list, location, [schema.get("const")])
        values = [value for value in values if any(_has_type(value, kind) for kind in types)]
        try:
            texts = [_write(value) for value in values]
            if "const" in schema:
                texts = [text for text in texts if text == _write(schema["const"])]
            self._count(texts, location)
        except ValueError:
            raise UsageError(f"{self._name}: a value at {location:.200} cannot be written as JSON; remove it") from None
        if not texts:
            raise UsageError(f"{self._name}: no value at {location:.200} has the type; correct enum, const or type")
        add_texts(self.rules, f"{location}~enum", texts)
        return [(f"{location}~enum",)]

    def _count(self, texts: Sequence[str], location: str) -> None:
        """Rejects too long names and constants."""
        lengths = [len(text.encode()) for text in texts]
        self._bytes += sum(lengths)
        if max(lengths, default=0) > LONGEST_TEXT or self._bytes > MOST_BYTES:
            raise UsageError(
                f"{self._name}: a name or constant at {location:.200} has {max(lengths):,} bytes, and all so far have "
                f"{self._bytes:,}; expected at most {LONGEST_TEXT:,} and {MOST_BYTES:,}"
            )

    def _add_object(self, schema: dict, location: str) -> str:
        """Returns a rule of objects whose properties come in the order of the schema.

        Without additionalProperties, an object with properties has only these, as models seldom need others.
        """
        properties = self._take(schema, "properties", dict, location, {})
        required = self._take(schema, "required", list, location, [])
        others = schema.get("additionalProperties", not properties and not required)
        if not all(isinstance(name, str) for name in required):
            raise UsageError(f"{self._name}: required at {location:.200} is {required!r:.60}; expected names")
        if not properties and not required and others is True:
            return "object"
        unlisted = schema.get("additionalProperties", True)
        properties = properties | {name: unlisted for name in required if name not in properties}
        needed = set(required)
        pairs = [(self._add_property(name, part, location), name in needed) for name, part in properties.items()]
        more = None
        if others is not False:
            more = self._add_others(properties, others, location)
        rule = f"{location}~object"
        # The rest of an object after the first n properties; `first`: it has none before.
        for first in (True, False):
            comma: tuple[Symbol, ...] = () if first else (*spell(","), "space")
            for n, (pair, is_required) in enumerate([*pairs, (more, False)]):
                rest = "end" if n == len(pairs) else str(n + 1)
                alternatives = self.rules[f"{rule}{n}{first}"] = []
                if pair:
                    alternatives.append((*comma, pair, f"{rule}{n if pair == more else rest}{False}"))
                if not is_required:
                    alternatives.append(spell("}") if rest == "end" else (f"{rule}{rest}{first}",))
        self.rules[rule] = [(*spell("{"), "space", f"{rule}0{True}")]
        return rule

    def _add_property(self, name: str, schema: Any, location: str) -> str:
        rule = f"{location}/properties/{_escape(name)}"
        key = self._spell_key(name, location)
        value = self.add(schema, rule)
        self.rules[f"{rule}~pair"] = [(*key, "space", *spell(":"), "space", value, "space")]
        return f"{rule}~pair"

    def _spell_key(self, name: str, location: str) -> tuple[Symbol, ...]:
        try:
            self._count([_write(name)], location)
            return spell(_write(name))
        except UnicodeEncodeError:
            raise UsageError(f"{self._name}: a name at {location:.200} has half of a character; remove it") from None

    def _add_others(self, properties: dict, schema: Any, location: str) -> str:
        value = self.add(schema, f"{location}/additionalProperties")
        rule = f"{location}~others"
        add_other_keys(self.rules, f"{rule}key", properties)
        self.rules[rule] = [(f"{rule}key", "space", *spell(":"), "space", value, "space")]
        return rule

    def _add_array(self, schema: dict, location: str) -> str:
        least, most = self._read_bounds(schema, "Items", location)
        item = self.add(schema.get("items", True), f"{location}/items")
        rule = f"{location}~array"
        self.rules[f"{rule}first"] = [(item, "space")]
        self.rules[f"{rule}next"] = [(*spell(","), "space", item, "space")]
        inside = self._repeat(f"{rule}n", f"{rule}next", least - 1, None if most is None else most - 1)
        self.rules[rule] = [] if most == 0 else [(*spell("["), "space", f"{rule}first", inside, *spell("]"))]
        if least == 0:
            self.rules[rule].append((*spell("["), "space", *spell("]")))
        return rule

    def _add_string(self, schema: dict, location: str) -> str:
        least, most = self._read_bounds(schema, "Length", location)
        if least == 0 and most is None:
            return "string"
        rule = f"{location}~string"
        self.rules[rule] = [(*spell('"'), self._repeat(f"{rule}n", "character", least, most), *spell('"'))]
        return rule

    def _read_bounds(self, schema: dict, of: str, location: str) -> tuple[int, int | None]:
        least = self._take(schema, f"min{of}", int, location, 0)
        most = self._take(schema, f"max{of}", int, location) if f"max{of}" in schema else None
        if not 0 <= least <= (MOST_REPEATS if most is None else most) <= MOST_REPEATS:
            raise UsageError(
                f"{self._name}: min{of} at {location:.200} is {least} and max{of} is {most}; expected 0 to "
                f"{MOST_REPEATS}, the first at most the second"
            )
        return least, most

    def _repeat(self, rule: str, symbol: str, least: int, most: int | None) -> str:
        """Returns the rule of at least and at most so many of a symbol, without end if `most` is None."""
        last = max(least, 0) if most is None else max(most, 0)
        for n in range(last + 1):
            self.rules[f"{rule}{n}"] = [()] if n >= least else []
            if n < last:
                self.rules[f"{rule}{n}"].append((symbol, f"{rule}{n + 1}"))
            elif most is None:
                self.rules[f"{rule}{n}"].append((symbol, f"{rule}{n}"))
        return f"{rule}0"


_NAMES = {dict: "an object", list: "a list", int: "a whole number"}


def _escape(word: str) -> str:
    return word.replace("~", "~0").replace("/", "~1")


def _has_type(value: Any, kind: str) -> bool:
    return isinstance(value, PYTHON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
