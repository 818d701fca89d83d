"""Tables and numbers for people."""

import math
import numbers
import re
from collections.abc import Sequence

# All but tab and line feed, and the marks that change the direction of a line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape(text: str) -> str:
    """Replaces characters that a terminal would interpret: names in other people's files may hold them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def format_table(rows: Sequence[Sequence], header: Sequence[str]) -> str:
    """Formats rows under a header, with columns of numbers aligned to the right."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
    aligned = []
    for heading, cells in zip(header, columns, strict=True):
        printed = [heading, *(cell if isinstance(cell, str) else format_number(cell) for cell in cells)]
        width = max(map(len, printed))
        align = str.rjust if all(map(_is_number, cells)) else str.ljust
        aligned.append([align(text, width) for text in printed])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def format_blocks(rows: Sequence[Sequence], header: Sequence[str]) -> str:
    """Formats each row as lines of its own, for a terminal narrower than the table; empty cells are left out."""
    lines = []
    for first, *others in rows:
        lines.append(str(first))
        printed = (cell if isinstance(cell, str) else format_number(cell) for cell in others)
        lines += [f"  {heading} {text}" for heading, text in zip(header[1:], printed, strict=True) if text]
    return "\n".join(lines)


def format_number(value: float | None) -> str:
    """Formats four decimals, or an exponent for very small and large values; empty for None."""
    if value is None:
        return ""
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.2e}"


def format_count(count: int, noun: str) -> str:
    """Formats a number and its noun, in the singular for 1: '1 layer', '2,000 layers'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _is_number(cell: object) -> bool:
    if not isinstance(cell, str):
        return True
    try:
        float(cell.replace(",", "").rstrip("%x "))
    except ValueError:
        return cell in ("", "-")
    return True


def format_bytes(count: float) -> str:
    """Formats bytes in decimal units, as vendors do: '72.61 GB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"


def escape_controls(text: str) -> str:
    """Returns a stranger's text without control characters, which a terminal would obey: '\\x1b' for an escape."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
