"""A csv file of metrics by step. A row is written before the next step starts; a resumed run appends."""

import math
from pathlib import Path

from shardformer.errors import RunError
from shardformer.files import GrowingFile, read_text, replacing

Row = dict[str, float | None]
MAX_STEP = 2**63 - 1
MAX_BYTES = 1 << 30
MAX_ROWS = 8_000_000  # a run that logs every step has fewer


class CsvFile:
    """The csv file at `path`; the first of `columns` is the step."""

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self._path = path
        self._columns = columns
        self._header = ",".join(columns)
        self._end = GrowingFile(path)

    def begin(self, first_step: int) -> list[Row]:
        """Drops the rows after `first_step` and returns the rest; 0 starts a new file."""
        try:
            rows = [row for row in self.read() if get_step(row) <= first_step] if first_step else []
        except FileNotFoundError:
            rows = []  # the checkpoint was copied without its metrics
        with replacing(self._path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in (self._header, *map(self._format, rows))))
        return rows

    def append(self, row: dict) -> None:
        """Writes a row; None becomes an empty cell."""
        unknown = sorted(set(row) - set(self._columns))
        if unknown or row.get("step") is None:
            problem = f"unknown keys {', '.join(unknown)}" if unknown else "no step"
            raise ValueError(f"a row of {self._path.stem} has {problem}; its keys are {self._header}")
        self._end.append(f"{self._format(row)}\n".encode())

    def flush(self) -> None:
        """Writes all pending rows. Rows that a full disk rejects stay pending until the next call."""
        self._end.flush()

    def read(self, most: int = MAX_ROWS, lowest: str = "") -> list[Row]:
        """Returns the rows, with None for an empty cell and for a column that an older version did not write.

        A file of more than `most` rows is thinned: of neighbouring rows, the first one with the least `lowest` remains.
        """
        try:
            text = read_text(self._path, MAX_BYTES)
        except UnicodeDecodeError as error:
            raise RunError(f"{self._path} is damaged: {error}; move it away to continue without it") from None
        if text.count("\n") > MAX_ROWS:
            raise RunError(
                f"{self._path} has more than {MAX_ROWS:,} rows; move it away to continue without it, and log fewer "
                "steps: log_every=100"
            )
        header, *lines = text.split("\n")
        columns = header.split(",")
        if columns[0] != "step" or not set(columns) <= set(self._columns) or len(set(columns)) < len(columns):
            raise RunError(
                f"{self._path} has unknown columns: got {header[:200]!r}, expected {self._header!r}; "
                "move it away to continue without it"
            )
        rows = []
        complete = list(enumerate(lines[:-1], start=2))  # a last line without its line feed was cut by a kill
        if len(complete) > most:
            complete = _thin(complete, most, columns.index(lowest) if lowest in columns else 0)
        for number, line in complete:
            try:
                rows.append(dict.fromkeys(self._columns) | _parse(columns, line))
            except ValueError:
                raise RunError(
                    f"{self._path}, line {number}, is not a row of {self._path.stem}: {line[:200]!r}; "
                    "remove that line to continue"
                ) from None
        return rows

    def _format(self, row: dict) -> str:
        values = (row.get(column) for column in self._columns[1:])
        return ",".join([str(int(row["step"])), *("" if value is None else repr(float(value)) for value in values)])


def get_step(row: Row) -> int:
    """Returns the step of a row: the only cell that is never empty."""
    step = row["step"]
    assert step is not None
    return int(step)


def _thin(lines: list[tuple[int, str]], most: int, cell: int) -> list[tuple[int, str]]:
    """Returns about `most` of the lines: of each group the first one with the least cell, and the last line."""

    def rank(numbered: tuple[int, str]) -> float:
        cells = numbered[1].split(",", cell + 1)
        try:
            value = float(cells[cell])
        except (ValueError, IndexError):
            return math.inf
        return math.inf if math.isnan(value) else value

    size = -(-len(lines) // most)
    selected = [min(lines[start : start + size], key=rank) for start in range(0, len(lines), size)]
    return selected if selected[-1] is lines[-1] else [*selected, lines[-1]]


def _parse(columns: list[str], line: str) -> Row:
    step, *cells = line.split(",")
    if not 0 <= int(step) <= MAX_STEP:
        raise ValueError
    return dict(zip(columns, [int(step), *(float(cell) if cell else None for cell in cells)], strict=True))
