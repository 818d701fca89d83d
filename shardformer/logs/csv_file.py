"""A csv file of numbers by step: a row is in it before the next step begins, and a resumed run goes on in it."""

from pathlib import Path

from shardformer.errors import RunError
from shardformer.files import replacing


class Rows:
    """One file of ours; `columns` begin with the step."""

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self._path = path
        self._columns = columns
        self._header = ",".join(columns)
        self._unwritten = b""

    def begin(self, first_step: int) -> list[dict[str, float | None]]:
        """The rows up to the step that a run continues from, which are all that is left in the file; 0 starts anew."""
        lines = self._lines_until(first_step) if first_step else []
        with replacing(self._path) as temporary:
            temporary.write_bytes("".join(f"{line}\n" for line in (self._header, *lines)).encode())
        return [self._parse(line) for line in lines]

    def append(self, row: dict) -> dict[str, float]:
        """Writes a row, where None is as good as absent, and gives its numbers."""
        unknown = sorted(set(row) - set(self._columns))
        if unknown or row.get("step") is None:
            problem = f"unknown keys {', '.join(unknown)}" if unknown else "no step"
            raise ValueError(f"a row of {self._path.stem} has {problem}; its keys are {self._header}")
        numbers = {key: float(value) for key, value in row.items() if value is not None}
        cells = [str(int(row["step"])), *(repr(numbers[key]) if key in numbers else "" for key in self._columns[1:])]
        self._unwritten += (",".join(cells) + "\n").encode()
        self.flush()
        return numbers

    def flush(self) -> None:
        """Writes what an earlier row, or a part of it, found no room for."""
        try:
            self._append()
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error}") from None

    def _append(self) -> None:
        """All rows that the file lacks. What a full disk has no room for waits for the next row, or the rest of it."""
        with self._path.open("ab", buffering=0) as file:
            while self._unwritten:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]

    def read(self) -> list[dict[str, float | None]]:
        """None where a step has no such number."""
        return [self._parse(line) for line in self._complete_lines()]

    def _lines_until(self, last_step: int) -> list[str]:
        try:
            lines = self._complete_lines()
        except FileNotFoundError:
            return []  # the checkpoint was copied without its records: nothing to continue, nothing to refuse
        return [line for line in lines if self._parse(line)["step"] <= last_step]

    def _complete_lines(self) -> list[str]:
        """Those without one that was being written when the process was killed."""
        try:
            header, *rows = self._path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise RunError(f"{self._path} is damaged: {error}; move it away to go on without it") from None
        if header != self._header:
            raise RunError(
                f"{self._path} has other columns than this version writes: got {header[:200]!r}, expected "
                f"{self._header!r}; move it away to go on without it"
            )
        complete = rows[:-1]  # what follows the last line feed is nothing, or torn
        for number, line in enumerate(complete, start=2):
            try:
                self._parse(line)
            except ValueError:
                raise RunError(
                    f"{self._path}, line {number}, is no row of {self._path.stem}: {line[:200]!r}; "
                    "remove that line to go on"
                ) from None
        return complete

    def _parse(self, line: str) -> dict[str, float | None]:
        step, *cells = line.split(",")
        numbers = [float(cell) if cell else None for cell in cells]
        return dict(zip(self._columns, [int(step), *numbers], strict=True))
