"""Faults of the rows of a corpus: each cause with a count and its first row."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from shardformer.errors import UsageError
from shardformer.tables import format_count

MAX_CAUSES = 20  # of which one report keeps the first row
MAX_PRINTED = 8  # causes in one message
OTHERS = "other causes"
T = TypeVar("T")


class RowError(UsageError):
    """A row of a corpus that cannot be trained on."""

    def __init__(self, location: str, problem: str, cause: str = ""):
        super().__init__(f"{location}, {problem}")
        self.cause = cause or problem


@dataclasses.dataclass
class RowReport:
    """The rows that are left out and those that are changed, by cause: (count, description of the first)."""

    faults: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    changes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.faults.values())

    def add_fault(self, error: RowError) -> None:
        _add(self.faults, error.cause, 1, str(error))

    def add_change(self, cause: str, location: str) -> None:
        """Notes a row that is used in another form than it is stored."""
        _add(self.changes, cause, 1, location)

    def merge(self, other: "RowReport") -> None:
        for mine, theirs in ((self.faults, other.faults), (self.changes, other.changes)):
            for cause, (count, first) in theirs.items():
                _add(mine, cause, count, first)

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(content: dict) -> "RowReport":
        result = RowReport()
        for name in ("faults", "changes"):
            for cause, (count, first) in content.get(name, {}).items():
                _add(getattr(result, name), str(cause), int(count), str(first))
        return result

    def raise_faults(self) -> None:
        """Raises UsageError with all causes if there is a fault."""
        if not self.faults:
            return
        if self.count == 1:
            [(_, first)] = self.faults.values()
            raise FaultyRows(f"{first}; correct it, or leave such rows out: bad_rows=skip", self)
        lines = [f"{self.count:,} rows cannot be learned; correct them, or leave such rows out: bad_rows=skip"]
        printed, rest = _most_frequent(self.faults)
        # `first` names the cause too.
        lines += [f"  - {format_count(count, 'row')}; the first: {first:.200}" for _, count, first in printed]
        lines += [f"  - {format_count(rest, 'row')} of other causes"] if rest else []
        raise FaultyRows("\n".join(lines), self)

    def describe(self) -> list[str]:
        """Returns a line for the rows that are left out, and one for those that are changed."""
        lines = []
        if self.faults:
            lines.append(f"left out (bad_rows=skip): {format_count(self.count, 'row')}: {_describe(self.faults)}")
        if self.changes:
            lines.append(f"rows that are changed: {_describe(self.changes)}")
        return lines


class FaultyRows(UsageError):
    """The rows of a source that cannot be trained on."""

    def __init__(self, message: str, report: RowReport):
        super().__init__(message)
        self.report = report


def join_faults(sources: Iterable[Callable[[], Iterable[T]]]) -> Iterator[T]:
    """Yields what each source yields; raises the faulty rows of all of them at the end."""
    report = RowReport()
    for read in sources:
        try:
            yield from read()
        except FaultyRows as error:
            report.merge(error.report)
    report.raise_faults()


def _add(counts: dict[str, tuple[int, str]], cause: str, count: int, first: str) -> None:
    if cause not in counts and len(counts) >= MAX_CAUSES:
        cause = OTHERS
    before, known = counts.get(cause, (0, first))
    counts[cause] = (before + count, known)


def _describe(counts: dict[str, tuple[int, str]]) -> str:
    printed, rest = _most_frequent(counts)
    parts = [f"{count:,} x {cause:.120} (the first: {first:.300})" for cause, count, first in printed]
    return "; ".join(parts) + (f"; {rest:,} of other causes" if rest else "")


def _most_frequent(counts: dict[str, tuple[int, str]]) -> tuple[list[tuple[str, int, str]], int]:
    """Returns (cause, count, the first) of the most frequent causes, and the number of rows of all others."""
    ordered = sorted(((cause, *each) for cause, each in counts.items()), key=lambda item: -item[1])
    return ordered[:MAX_PRINTED], sum(count for _, count, _ in ordered[MAX_PRINTED:])
