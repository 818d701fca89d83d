"""What a run leaves to be read: `metrics.csv`, one row per logged step, and the same numbers as TensorBoard events.

The file is the record: a row is in it before the next step begins, and a resumed run goes on where its checkpoint was.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from shardformer.errors import RunError
from shardformer.report.rows import Rows

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
_FLUSH_EVENTS_MS = 5000


class Records:
    """Writes the metrics of a run that continues from `first_step`; 0 starts a new file."""

    def __init__(self, out: Path, first_step: int = 0):
        self._out = Path(out)
        self._first_step = first_step
        self._rows = Rows(metrics_path(self._out), COLUMNS)
        self.elapsed_before = 0.0  # seconds that the run had taken when it was interrupted

    def __enter__(self) -> "Records":
        self._out.mkdir(parents=True, exist_ok=True)
        kept = self._rows.begin(self._first_step)
        elapsed = [row["elapsed_s"] for row in kept if row["elapsed_s"] is not None]
        self.elapsed_before = elapsed[-1] if elapsed else 0.0
        self._events = _Events(self._out / "tensorboard", new=self._first_step == 0)
        return self

    def __exit__(self, *_) -> None:
        """What finds no room now has been told of, row by row."""
        for end in (self._rows.flush, self._events.close):
            with contextlib.suppress(RunError):
                end()

    def write(self, row: dict) -> None:
        numbers = self._rows.append(row)
        self._events.write(int(row["step"]), numbers)


def metrics_path(out: Path) -> Path:
    return Path(out) / "metrics.csv"


def read(out: Path) -> dict[str, list[float | None]]:
    """The columns of a run's metrics.csv; None where a step has no such number."""
    try:
        rows = Rows(metrics_path(out), COLUMNS).read()
    except FileNotFoundError:
        raise RunError(f"{out} has no metrics.csv; is it the folder of a run?") from None
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
        self._folder = folder
        self._writer = self._new_file()
        self._metadata = self._tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._writer = self._writer or self._new_file()
        with self._told(), self._writer.as_default(step):
            for key in TAGS.keys() & numbers.keys():
                value = self._tf.constant(numbers[key], self._tf.float32)
                self._tf.summary.write(TAGS[key], value, metadata=self._metadata)

    def close(self) -> None:
        if self._writer:
            with self._told():
                self._writer.close()

    def _new_file(self):
        with self._told():
            return self._tf.summary.create_file_writer(  # a short queue would flush at every few rows
                str(self._folder), max_queue=10_000, flush_millis=_FLUSH_EVENTS_MS, filename_suffix=".v2"
            )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A full disk ends this file, which nobody reads beyond a torn event; the next numbers go into a new one."""
        try:
            yield
        except self._tf.errors.OpError as error:
            self._writer = None
            problem = error.message.rpartition("; ")[2].partition("\n")[0]
            raise RunError(f"cannot write TensorBoard's events in {self._folder}: {problem}") from None
