"""A key of a configuration: its default, its meaning, the values that it accepts, and when it has an effect."""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from shardformer.config.parsing import choices, flat_name, is_optional, keys_of, plain_type, shorten, suggest_closest
from shardformer.config.registries import OWN, names_code
from shardformer.errors import UsageError

__all__ = ["KeyGroup", "UsedIf", "check_value", "format_value", "is_optional", "key", "keys_of", "require"]

MAX_FLOAT32 = 3.4e38
MAX_INT32 = 2**31


class UsedIf(NamedTuple):
    """A condition on the configuration under which a key has an effect, and the message without it."""

    holds: Callable[[Any], object]
    otherwise: str  # completes "KEY does nothing ..."


def key(
    default,
    meaning: str,
    *,
    least: float | None = None,
    below: float | None = None,
    none: str = "auto",
    zero: str = "",
    fixed: bool = False,
    needs: str = "",
    used_if: UsedIf | None = None,
    flat: str = "",
    registry: str = "",
    takes_code: bool = False,
) -> Any:
    """Returns a field of an options dataclass.

    Arguments:
      meaning: the text of `--help`.
      least, below: the bounds of a number; `least` is inclusive.
      none: the command line's word for None, for a field whose type allows it.
      zero: the command line's word for 0, for a number that is 0 until the data or the devices are known.
      fixed: the key cannot change on resume.
      needs: another key without which this one has no effect.
      used_if: any other condition under which this key has an effect.
      flat: the name on the command line and in config.json, if it is another than the field's.
      registry: the file of the package whose registered functions are the values; see registries.py.
      takes_code: FILE.py:NAME is a value too, a function of the user's file, which no run stores.
    """
    metadata: dict[str, object] = {"meaning": meaning, "least": least, "below": below, "fixed": fixed}
    metadata |= {"none": none, "zero": zero, "needs": needs, "used_if": used_if, "flat": flat}
    metadata |= {"registry": registry, "takes_code": takes_code}
    return dataclasses.field(default=default, metadata=metadata)


class KeyGroup:
    """A frozen dataclass of keys. Its docstring is its title in `--help`; `check` has the rules of its keys."""

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each group is a dataclass
            check_value(field, getattr(self, field.name))
        self.check()
        if self.is_complete:
            compute_derived(self)

    @property
    def is_complete(self) -> bool:
        """True if no value waits for the data or the devices."""
        return True

    def check(self) -> None:
        """Raises UsageError if the values break a rule of this group."""


def compute_derived(keys) -> None:
    """Computes every derived value once, so that a step reads plain attributes."""
    for base in type(keys).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, functools.cached_property):
                getattr(keys, name)


def require(holds: object, message: str) -> None:
    if not holds:
        raise UsageError(message)


def format_value(field: dataclasses.Field, value) -> str:
    """Returns a value as the command line accepts it."""
    if value is None:
        return field.metadata["none"]
    if field.metadata["zero"] and value == 0:
        return field.metadata["zero"]
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def check_value(field: dataclasses.Field, value) -> None:
    """Raises UsageError if a value has another type than its field, or is out of its range."""
    name, kind, metadata = flat_name(field), plain_type(field.type), field.metadata
    if value is None and is_optional(field.type):
        return
    if known := choices(field):
        if metadata.get("takes_code") and (names_code(value) or value == OWN):
            return
        as_text = next((f"; give {each!r} without quotes" for each in known if str(each) == value), "")
        closest = as_text or suggest_closest(str(value), map(str, known))
        listed = ", ".join(map(str, known)) + (", or FILE.py:NAME" if metadata.get("takes_code") else "")
        require(value in known, f"{name} is one of {listed}; got {shorten(value)}{closest}")
        return
    require(_is_of_type(value, kind), f"{name} takes {kind.__name__}, got {shorten(value)}")
    if kind is str:
        require(_is_possible_path(value), f"{name} has a character that no path may have, got {shorten(value)}")
    if kind is int:
        require(abs(value) < MAX_INT32, f"{name} must be below 2**31, got {shorten(value)}")
    if kind is float:
        _check_float(name, value)
    least, below = metadata.get("least"), metadata.get("below")
    if least is not None and not isinstance(value, bool):
        bound = "not be negative" if least == 0 else f"be at least {least}"
        word = f", or {metadata['none']}" if is_optional(field.type) else ""
        require(value >= least, f"{name} must {bound}{word}, got {value}")
    if below is not None:
        require(value < below, f"{name} must be below {below}, got {value}")


def _is_of_type(value, kind) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))


def _check_float(name: str, value: float) -> None:
    require(abs(value) <= sys.float_info.max, f"{name} must be a finite number, got {shorten(value)}")
    require(abs(value) < MAX_FLOAT32, f"{name} must be below {MAX_FLOAT32:g}, the largest of float32, got {value!r}")
    fits_jax = isinstance(value, float) or abs(value) < MAX_INT32  # JAX accepts no larger integer
    require(fits_jax, f"{name} must be below 2**31, or written as 1e10, got {shorten(value)}")


def _is_possible_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def largest_divisor(size: int, at_most: int) -> int:
    """Returns the largest divisor of `size` that is not above `at_most`."""
    return next(n for n in range(min(size, at_most), 0, -1) if size % n == 0)


def next_multiple(number: int, of: int) -> int:
    return math.ceil(number / of) * of
