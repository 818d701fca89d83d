"""What a run leaves to be read: `metrics.csv`, one row per logged step, and the same numbers as TensorBoard events.

The file is the record: a row is in it before the next step begins, and a resumed run goes on where its checkpoint was.
"""

from pathlib import Path

from shardformer.errors import RunError
from shardformer.files import replacing

COLUMNS = (
    "step",
    "loss",
    "val_loss",
    "z_loss",
    "accuracy",
    "val_accuracy",
    "grad_norm",
    "update_norm",
    "lr",
    "tokens_per_s",
    "elapsed_s",
    "save_s",  # that training has waited for checkpoints since the row before
)
# TensorBoard groups its charts by what stands before the slash.
TAGS = {
    "loss": "train/loss",
    "val_loss": "validation/loss",
    "z_loss": "train/z_loss",
    "accuracy": "train/accuracy",
    "val_accuracy": "validation/accuracy",
    "grad_norm": "optimizer/grad_norm",
    "update_norm": "optimizer/update_norm",
    "lr": "optimizer/learning_rate",
    "tokens_per_s": "speed/tokens_per_s",
    "save_s": "speed/save_s",
}
_HEADER = ",".join(COLUMNS)
_FLUSH_EVENTS_MS = 5000


class Records:
    """Writes the metrics of a run that continues from `first_step`; 0 starts a new file."""

    def __init__(self, out: Path, first_step: int = 0):
        self._out = Path(out)
        self._first_step = first_step
        self.elapsed_before = 0.0  # seconds that the run had taken when it was interrupted

    def __enter__(self) -> "Records":
        self._out.mkdir(parents=True, exist_ok=True)
        path = metrics_path(self._out)
        rows = _rows_until(path, self._first_step) if self._first_step else []
        elapsed = [row["elapsed_s"] for row in map(_parse, rows) if row["elapsed_s"] is not None]
        self.elapsed_before = elapsed[-1] if elapsed else 0.0
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in (_HEADER, *rows)), encoding="utf-8", newline="\n")
        self._events = _Events(self._out / "tensorboard", new=self._first_step == 0)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self._events.close()

    def write(self, row: dict) -> None:
        unknown = sorted(set(row) - set(COLUMNS))
        if unknown or row.get("step") is None:
            problem = f"unknown keys {', '.join(unknown)}" if unknown else "no step"
            raise ValueError(f"a row of metrics has {problem}; its keys are {', '.join(COLUMNS)}")
        numbers = {key: float(value) for key, value in row.items() if value is not None}
        step = int(row["step"])
        cells = [str(step), *(repr(numbers[key]) if key in numbers else "" for key in COLUMNS[1:])]
        self._file.write(",".join(cells) + "\n")
        self._file.flush()  # a killed process loses nothing that it has handed to the system
        self._events.write(step, numbers)


def metrics_path(out: Path) -> Path:
    return Path(out) / "metrics.csv"


def read(out: Path) -> dict[str, list[float | None]]:
    """The columns of a run's metrics.csv; None where a step has no such number."""
    path = metrics_path(out)
    try:
        lines = _complete_lines(path)
    except FileNotFoundError:
        raise RunError(f"{out} has no metrics.csv; is it the folder of a run?") from None
    rows = [_parse(line) for line in lines]
    return {column: [row[column] for row in rows] for column in COLUMNS}


def best_validation(series: dict[str, list[float | None]]) -> tuple[int, float] | None:
    """Step and value of the lowest validation loss, the earliest of equals."""
    evaluated = [
        (loss, int(step))
        for step, loss in zip(series["step"], series["val_loss"], strict=True)
        if loss is not None and loss == loss  # a NaN is the best of nothing
    ]
    if not evaluated:
        return None
    loss, step = min(evaluated)
    return step, loss


def _rows_until(path: Path, last_step: int) -> list[str]:
    try:
        lines = _complete_lines(path)
    except FileNotFoundError:
        return []  # the checkpoint was copied without its records: nothing to continue, nothing to refuse
    return [line for line in lines if _parse(line)["step"] <= last_step]


def _complete_lines(path: Path) -> list[str]:
    """The rows of a file of ours, without one that was being written when the process was killed."""
    try:
        header, *rows = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: {error}; move it away to go on without it") from None
    if header != _HEADER:
        raise RunError(
            f"{path} has other columns than this version writes: got {header[:200]!r}, expected {_HEADER!r}; "
            "move it away to go on without it"
        )
    complete = rows[:-1]  # what follows the last line feed is nothing, or torn
    for number, line in enumerate(complete, start=2):
        try:
            _parse(line)
        except ValueError:
            raise RunError(
                f"{path}, line {number}, is no row of metrics: {line[:200]!r}; remove that line to go on"
            ) from None
    return complete


def _parse(line: str) -> dict[str, float | None]:
    step, *cells = line.split(",")
    numbers = [float(cell) if cell else None for cell in cells]
    return dict(zip(COLUMNS, [int(step), *numbers], strict=True))


class _Events:
    """TensorBoard's form of the rows.

    `tf.summary.scalar` needs the tensorboard package, which TensorFlow no longer brings along; `tf.summary.write`
    does not, and with this metadata TensorBoard shows the same charts.
    """

    def __init__(self, folder: Path, new: bool):
        from shardformer.data.tensorflow import import_tensorflow  # takes seconds: only where events are written

        self._tf = import_tensorflow()
        if new:  # the curves of an earlier run in this folder would be drawn into those of this one
            for earlier in folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        # A short queue would flush at every few rows.
        self._writer = self._tf.summary.create_file_writer(
            str(folder), max_queue=10_000, flush_millis=_FLUSH_EVENTS_MS, filename_suffix=".v2"
        )
        self._metadata = self._tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, step: int, numbers: dict[str, float]) -> None:
        with self._writer.as_default(step):
            for key in TAGS.keys() & numbers.keys():
                value = self._tf.constant(numbers[key], self._tf.float32)
                self._tf.summary.write(TAGS[key], value, metadata=self._metadata)

    def close(self) -> None:
        self._writer.close()
