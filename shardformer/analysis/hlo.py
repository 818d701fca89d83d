"""Reads a compiled program's text: the lines that run, following calls and loops, and how often each runs."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CONSTANT = re.compile(r"\bconstant\((\d+)\)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_BLOCKS_IN_BLOCKS = re.compile(r'op_name="[^"]*/attention/[^"]*/while/body/[^"]*while"')
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_NONE = 10**15  # estimates from here on stand for "not known"


class Line(NamedTuple):
    """One line of a program."""

    text: str
    computation: str
    in_loop: bool  # within a scan
    times: float  # in one run of the program: iterations of the loops around it
    fused: bool  # a part of another operation


def running_lines(hlo: str) -> Iterator[Line]:
    """Yields the lines that a module runs; of a fragment without an entry, all lines."""
    computations, entry = find_computations(hlo)
    if entry is None:
        yield from (Line(text, name, False, 1, False) for name, lines in computations.items() for text in lines)
    else:
        yield from _follow_computation(computations, entry, 1, 0, False)


def estimate_cycles(hlo: str) -> int:
    """Returns the TPU compiler's estimate of a program's arithmetic and memory traffic.

    It counts neither collectives nor kernels that the compiler did not write.
    """
    return round(sum(line.times * read_estimate(line.text) for line in running_lines(hlo) if not line.fused))


def read_estimate(line: str) -> int:
    """Returns the estimated cycles of a line; 0 without an estimate."""
    match = _ESTIMATE.search(line)
    return int(match[1]) if match and int(match[1]) < _NONE else 0


def find_loop(line: str, computations: dict[str, list[str]]) -> tuple[str, float] | None:
    """Returns the body of the loop that a line runs, and how often; None for any other line."""
    if not (match := _WHILE.search(line)):
        return None
    condition, body = match.groups()
    return body, _trips(line, computations.get(condition, ()), 0)


def find_branches(line: str) -> list[str]:
    """Returns the computations among which a line chooses one; none for a line without a choice."""
    result = _BRANCHES.search(line) or _TWO_BRANCHES.search(line)
    return re.findall(r"[\w.\-]+", ",".join(result.groups())) if result else []


def find_computations(hlo: str) -> tuple[dict[str, list[str]], str | None]:
    """Returns the lines of each computation by its name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry: str | None = None
    lines: list[str] | None = None
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif lines is None:
            computations.setdefault("", []).append(line)
        else:
            lines.append(line)
    return computations, entry


def _follow_computation(computations, name: str, count: float, trips: float, fused: bool) -> Iterator[Line]:
    """Yields the lines of one computation; `trips` are those of the innermost loop around it, 0 outside of loops."""
    for text in computations.get(name, ()):
        yield Line(text, name, trips > 0, count, fused)
        if match := _WHILE.search(text):
            condition, body = match.groups()
            inner = _trips(text, computations.get(condition, ()), trips)
            yield from _follow_computation(computations, body, count * inner, inner, fused)
        else:
            for called in _called(text):
                yield from _follow_computation(computations, called, count, trips, fused or " fusion(" in text)


def _trips(line: str, condition: Iterable[str], around: float) -> float:
    """Returns how often a loop runs: XLA's count, or the constant in the loop's condition.

    Blockwise attention visits a triangle: half of a square of blocks, and the diagonal.
    """
    if around and _BLOCKS_IN_BLOCKS.search(line):
        return (around + 1) / 2
    if known := _TRIPS.search(line):
        return int(known[1])
    return max((int(n) for text in condition for n in _CONSTANT.findall(text)), default=1)


def _called(line: str) -> list[str]:
    if " all-reduce" in line or " reduce" in line:
        return []  # `to_apply` is the sum of two values
    if line.lstrip().startswith("%async-collective-done"):
        return []  # the fusions after the start of an asynchronous collective repeat it
    names = [name for name in _CALLED.findall(line) if not name.startswith("async_collective_fusion")]
    return names + find_branches(line)
