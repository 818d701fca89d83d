"""The rules of JSON: any value, and strings, numbers and white space, of which those of a schema consist."""

import functools
import json
from collections.abc import Iterable

from shardformer.inference.grammars.grammar import Rules, Symbol, one_of, spell

MOST_SPACES = 20  # after a line feed: a model that likes white space would write nothing else
MOST_DIGITS = 15  # before and after the point: Python does not read more than 4,300
DIGIT, HEX, TAIL = one_of("0123456789"), one_of("0123456789abcdefABCDEF"), one_of(range(0x80, 0xC0))

PLAIN = frozenset(range(0x20, 0x80)) - frozenset(b'"\\')

# UTF-8, and escapes, with surrogates in pairs only.
STRINGS: Rules = {
    "string": [(*spell('"'), "characters")],
    "characters": [spell('"'), ("character", "characters")],
    "character": [
        (PLAIN,),
        (*spell("\\"), "escape"),
        (one_of(range(0xC2, 0xE0)), TAIL),
        (one_of([0xE0]), one_of(range(0xA0, 0xC0)), TAIL),
        (one_of([*range(0xE1, 0xED), 0xEE, 0xEF]), TAIL, TAIL),
        (one_of([0xED]), one_of(range(0x80, 0xA0)), TAIL),
        (one_of([0xF0]), one_of(range(0x90, 0xC0)), TAIL, TAIL),
        (one_of([0xF1, 0xF2, 0xF3]), TAIL, TAIL, TAIL),
        (one_of([0xF4]), one_of(range(0x80, 0x90)), TAIL, TAIL),
    ],
    "escape": [(one_of('"\\/bfnrt'),), (*spell("u"), "code")],
    "code": [
        (one_of("0123456789abcefABCEF"), HEX, HEX, HEX),
        (one_of("dD"), one_of("01234567"), HEX, HEX),
        (one_of("dD"), one_of("89abAB"), HEX, HEX, *spell("\\u"), one_of("dD"), one_of("cdefCDEF"), HEX, HEX),
    ],
}
NUMBERS: Rules = {
    "number": [("integer", "fraction", "exponent")],
    "integer": [("natural",), (*spell("-"), "natural")],
    "natural": [spell("0"), (one_of("123456789"), f"digits{MOST_DIGITS}")],
    "fraction": [(), (*spell("."), DIGIT, f"digits{MOST_DIGITS}")],
    "exponent": [(), (one_of("eE"), "sign", DIGIT), (one_of("eE"), "sign", DIGIT, DIGIT)],
    "sign": [(), (one_of("+-"),)],
    **{f"digits{n}": [(), (DIGIT, f"digits{n - 1}")] for n in range(1, MOST_DIGITS + 1)},
    "digits0": [()],
}
SPACES: Rules = {
    "space": [(), spell(" "), (*spell("\n"), f"spaces{MOST_SPACES}")],
    **{f"spaces{n}": [(), (one_of(" \t"), f"spaces{n - 1}")] for n in range(1, MOST_SPACES + 1)},
    "spaces0": [()],
}
VALUES: Rules = {
    "value": [("object",), ("array",), ("string",), ("number",), ("boolean",), ("null",)],
    "boolean": [spell("true"), spell("false")],
    "null": [spell("null")],
    "object": [(*spell("{"), "space", *spell("}")), (*spell("{"), "space", "member", "members")],
    "member": [("string", "space", *spell(":"), "space", "value", "space")],
    "members": [spell("}"), (*spell(","), "space", "member", "members")],
    "array": [(*spell("["), "space", *spell("]")), (*spell("["), "space", "value", "space", "items")],
    "items": [spell("]"), (*spell(","), "space", "value", "space", "items")],
}
JSON: Rules = {**STRINGS, **NUMBERS, **SPACES, **VALUES}
JSON_OBJECT: Rules = {**JSON, "root": [("space", "object")]}


def add_texts(rules: Rules, name: str, texts: Iterable[str]) -> None:
    """Adds a rule with the given texts: a tree of their characters, so that few alternatives are open at once."""
    by_first: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        by_first.setdefault(text[:1], []).append(text)
    rules[name] = []
    for number, alike in enumerate(by_first.values()):
        common = alike[0][: _count_equal(alike[0], alike[-1])]  # the first and the last in order differ first
        if len(alike) == 1:
            rules[name].append(spell(common))
        else:
            rules[name].append((*spell(common), f"{name}.{number}"))
            add_texts(rules, f"{name}.{number}", [text[len(common) :] for text in alike])


def _count_equal(a: str, b: str) -> int:
    return next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def add_other_keys(rules: Rules, name: str, keys: Iterable[str]) -> None:
    """Adds a rule with the strings that are none of some keys, from their first quotation mark to their last.

    A string has no escape before its first difference from all keys, as an escape may stand for a letter of a key.
    """
    texts = [json.dumps(key, ensure_ascii=False).encode("utf-8", "replace")[1:] for key in keys]
    rules[name] = [(*spell('"'), f"{name}.0")]
    todo = [texts]  # the texts that may still go on, of each rule of a difference
    for number, left in enumerate(todo):  # which grows
        first = frozenset(text[0] for text in left if text)
        rules[f"{name}.{number}"] = alternatives = list(_list_differences(first))
        for byte in sorted(first & PLAIN):
            alternatives.append((frozenset([byte]), f"{name}.{len(todo)}"))
            todo.append([text[1:] for text in left if text[:1] == bytes([byte])])


@functools.lru_cache(1000)  # most rules have one of few bytes, and equal ones share their sets
def _list_differences(first: frozenset[int]) -> list[tuple[Symbol, ...]]:
    """Returns the rests of a string whose next byte is none of some."""
    alternatives: list[tuple[Symbol, ...]] = [(PLAIN - first, "characters")]
    if ord('"') not in first:
        alternatives.append(spell('"'))
    # A character of more bytes differs if its first byte does.
    for symbols in STRINGS["character"][2:]:
        assert not isinstance(symbols[0], str)
        if different := symbols[0] - first:
            alternatives.append((different, *symbols[1:], "characters"))
    return alternatives
