"""Parses the words of a command into typed values, or says what a key takes."""

import dataclasses
import difflib
import math
import re
from typing import NamedTuple, TypeVar

from shardformer.errors import UsageError

MAX_FACTOR = 1e6  # of lr_rules; times a rate and an update it must stay a number of float32
PICTURES = (".png", ".svg", ".pdf", ".jpg")  # that every matplotlib draws
T = TypeVar("T")


def key(default, meaning: str):
    """A field of an options dataclass; `meaning` is what `--help` says of it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def parse_overrides(words: list[str], options: type) -> dict:
    """['lr=3e-4', 'mesh=4x2'] as typed values of the fields of a dataclass."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    parsed = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            meant = key.lstrip("-")
            fix = f"; write {meant}=..." if meant in fields else ""
            raise UsageError(f"expected key=value, got {shorten(word)}{fix}")
        if key not in fields:
            keys = f"; the keys are {', '.join(fields)}" if len(fields) < 20 else "; see COMMAND --help"
            raise UsageError(f"unknown key {shorten(key)}{suggest_closest(key, fields) or keys}")
        if key in parsed:
            raise UsageError(f"{key} is given twice: {parsed[key]!r} and {text!r}")
        parsed[key] = parse_value(key, text, fields[key].type)
    return parsed


def parse_options(words: list[str], options: type[T]) -> T:
    """'key=value' words as the options of a command."""
    return options(**parse_overrides(words, options))


def parse_own_options(words: list[str], options: type[T]) -> tuple[T, list[str]]:
    """The options of a command from those words that set one of them, and the other words."""
    names = {field.name for field in dataclasses.fields(options)}
    own = [word for word in words if word.partition("=")[0] in names]
    return parse_options(own, options), [word for word in words if word not in own]


def parse_value(key: str, text: str, kind: type):
    """`text` as a `kind`, or a UsageError that names the key and what it takes."""
    try:
        if kind in (int, float) and not text.isascii():  # Python would take the digits of any script
            raise ValueError
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if key == "accum" and text == "auto":
            return 0
        if kind is int:
            number = float(text)
            if number != int(number):
                raise ValueError
            return int(number) if abs(number) >= 2**53 or "e" in text.lower() else int(text)
        return kind(text)
    except (ValueError, KeyError, OverflowError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"{key} takes {wanted}, got {shorten(text)}") from None


def parse_mesh(text: str) -> tuple[int, int, int]:
    """'4x2' as (dp, mp, pp), where pp is 1; '2x2x2' has pipeline stages as well."""
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){1,2}", text, re.ASCII):
        raise UsageError(
            "mesh takes AxB (dp x mp, such as 4x2), AxBxC (and pp stages of a pipeline, such as 2x2x2) or auto, "
            f"got {shorten(text)}"
        )
    dp, mp, pp = map(int, [*text.split("x"), "1"][:3])
    return dp, mp, pp


def parse_steps_range(key: str, text: str) -> tuple[int, int] | None:
    """'100:110' as (100, 110), the first and the last step; None for an empty text."""
    if not text:
        return None
    first, _, last = text.partition(":")
    fits = re.fullmatch(r"\d{1,9}:\d{1,9}", text, re.ASCII) and 1 <= int(first) <= int(last)
    if not fits:
        raise UsageError(f"{key} takes FROM:TO, two steps from 1 such as 100:110, got {shorten(text)}")
    return int(first), int(last)


class LrRule(NamedTuple):
    """What the parameters whose names match a pattern learn at: a factor of the rate; 0 is frozen."""

    pattern: str
    factor: float

    def __str__(self):
        return f"{self.pattern}={f'{self.factor:g}x' if self.factor else 'frozen'}"


def parse_lr_rules(text: str) -> tuple[LrRule, ...]:
    """'bias=10x,norm=frozen' as rules, in their order."""
    rules = []
    for word in text.split(",") if text else ():
        pattern, _, effect = word.strip().partition("=")
        number = "0" if effect == "frozen" else effect.removesuffix("x") if effect.endswith("x") else "nan"
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not (pattern and 0 <= factor < math.inf):
            raise UsageError(f"lr_rules takes PATTERN=FACTORx or PATTERN=frozen, such as bias=10x; got {word!r}")
        if factor > MAX_FACTOR:
            raise UsageError(f"lr_rules takes factors up to {MAX_FACTOR:g}x, got {shorten(word)}")
        if pattern in (rule.pattern for rule in rules):
            raise UsageError(f"lr_rules has two rules for {pattern!r}, of which the first would win; leave one")
        rules.append(LrRule(pattern, factor))
    return tuple(rules)


class RotaryScaling(NamedTuple):
    """How rotary frequencies are stretched for contexts longer than those of the first training."""

    kind: str  # linear or llama3
    factor: float
    low: float = 1.0  # of llama3: wavelengths above old_seq / low are stretched, those below old_seq / high are kept
    high: float = 4.0
    old_seq: float = 8192.0


def parse_rotary_scaling(text: str) -> RotaryScaling | None:
    """'linear:2' or 'llama3:8,1,4,8192'; '' is None."""
    if not text:
        return None
    kind, _, numbers = text.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if len(values) != {"linear": 1, "llama3": 4}.get(kind) or not all(0 < value < math.inf for value in values):
        raise UsageError(
            f"rotary_scaling takes linear:FACTOR or llama3:FACTOR,LOW,HIGH,OLD_SEQ, such as llama3:8,1,4,8192; got "
            f"{shorten(text)}"
        )
    if kind == "llama3" and values[1] >= values[2]:
        raise UsageError(f"rotary_scaling={text}: LOW must be below HIGH")
    return RotaryScaling(kind, *values)


def shorten(value, most: int = 80) -> str:
    """What a user gave, as a message quotes it: one readable line however long it is."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def suggest_closest(word: str, known) -> str:
    """'; did you mean ...?' where a known word is close, else nothing."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
