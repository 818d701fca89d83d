"""What a run leaves to be read: `metrics.csv`, one row per logged step, and the same numbers as TensorBoard events.

The file is the record: a row is in it before the next step begins, and a resumed run goes on where its checkpoint was.
"""

import contextlib
from pathlib import Path

from shardformer.errors import RunError
from shardformer.logs.csv_file import Rows
from shardformer.logs.events import Events

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
        self._events = Events(self._out / "tensorboard", new=self._first_step == 0)
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
