"""`rotary_scaling`: changes of the rotary frequencies for contexts longer than those of the first training."""

import math
from typing import NamedTuple

from shardformer.config.names import ROTARY_SCALINGS
from shardformer.config.parsing import shorten
from shardformer.errors import UsageError


class RotaryScaling(NamedTuple):
    """A change of the rotary frequencies for contexts longer than those of the first training."""

    kind: str  # linear, llama3, yarn or longrope
    factor: float = 1.0
    # llama3 and yarn stretch wavelengths above old_seq / low, keep those below old_seq / high and blend in between.
    low: float = 1.0
    high: float = 4.0
    old_seq: float = 8192.0
    attention: float = 1.0  # yarn's and longrope's factor on rotated queries and keys
    truncate: bool = True  # yarn blends from one pair to another, not from a fraction of the way between pairs
    # longrope divides the frequency of each pair by its number: of `short` in rows of at most old_seq tokens, of `long`
    # in longer ones.
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


UNTRUNCATED = "_untruncated"


def parse_rotary_scaling(text: str) -> RotaryScaling:
    """Returns the scaling of 'linear:2' or 'llama3:8,1,4,8192'."""
    kind, _, figures = text.partition(":")
    try:
        values = [float(number) for number in figures.split(",")]
    except ValueError:
        values = []
    if kind == "longrope":
        numbered = len(values) >= 4 and len(values) % 2 == 0
    else:
        numbered = kind in ROTARY_SCALINGS and len(values) == len(ROTARY_SCALINGS[kind].split(","))
    if not numbered or not all(0 < value < math.inf for value in values):
        raise UsageError(
            f"rotary_scaling takes {' or '.join(ROTARY_SCALINGS.values())}, such as llama3:8,1,4,8192; got "
            f"{shorten(text)}"
        )
    if kind == "longrope":
        middle = 1 + len(values) // 2
        short, long = tuple(values[2:middle]), tuple(values[middle:])
        return RotaryScaling(kind, old_seq=values[0], attention=values[1], short=short, long=long)
    if kind != "linear" and values[1] > values[2]:  # they are equal in Kimi K2 and in Llama 4
        raise UsageError(f"rotary_scaling={text}: LOW must be at most HIGH")
    scaling = RotaryScaling(kind.removesuffix(UNTRUNCATED), *values)  # type: ignore[arg-type]  # fields before `truncate`
    return scaling._replace(truncate=not kind.endswith(UNTRUNCATED))
