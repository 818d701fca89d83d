"""`metrics.csv`: the record of a run, with one row for each logged step. All pictures are drawn from it.

`experts.csv` has the load of each layer's experts at each logged step.
"""

import math
from pathlib import Path

from shardformer.errors import RunError
from shardformer.logs.csv_file import CsvFile, Row

EXPERTS_FILE, LARGEST_SHARE = "experts.csv", "largest_share"
MAX_HEADER = 10_000  # characters
MAX_POINTS = 20_000  # of a picture, which has 1,200 pixels
Series = dict[str, list[float | None]]
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
    "save_s",  # seconds that training waited for checkpoints since the previous row
    "data_s",  # seconds that training waited for batches since the previous row
    "val_nats_per_byte",
    "val_bits_per_byte",
    "peak_bytes",  # the most memory so far of the fullest device, or of the process if devices report none (CPU)
    "mfu",  # model FLOPs over the chips' peak; empty for chips without an entry in devices/chips.py (CPU)
)


def open_metrics_file(out: Path, more: tuple[str, ...] = ()) -> CsvFile:
    """Opens the file of a run; `more` are the columns that only its objective has."""
    return CsvFile(Path(out) / "metrics.csv", (*COLUMNS, *more))


def find_elapsed_seconds(rows: list[Row]) -> float:
    """Returns the elapsed seconds at the last row; 0 for a value that cannot be a time."""
    elapsed = [row["elapsed_s"] for row in rows if row["elapsed_s"] is not None]
    return elapsed[-1] if elapsed and 0 <= elapsed[-1] < 1e10 else 0.0


def read_metrics(out: Path, most: int = MAX_POINTS) -> Series:
    """Returns the columns of a run's metrics.csv, with None for an empty cell; more than `most` rows are thinned.

    The columns that only the run's task has are included if they have a value.
    """
    try:
        known = find_further_columns(Path(out) / "metrics.csv")
        rows = open_metrics_file(out, known).read(most, lowest="val_loss")
    except FileNotFoundError:
        raise RunError(f"{out} has no metrics.csv; is it the folder of a run?") from None
    more = [column for column in known if any(row[column] is not None for row in rows)]
    return {column: [row[column] for row in rows] for column in (*COLUMNS, *more)}


def find_further_columns(path: Path) -> tuple[str, ...]:
    """Returns the columns of a task's own metrics, which a file has besides those of every run."""
    with path.open(errors="replace") as file:
        columns = file.readline(MAX_HEADER).rstrip("\n").split(",")
    if not {"loss", "lr"} <= set(columns):
        return ()  # not a run's
    return tuple(column for column in columns if column.isidentifier() and column not in COLUMNS)


def find_last_step(series: Series) -> int:
    """Returns the last step of a run; 0 for a run without rows."""
    return int(max((step for step in series["step"] if step is not None), default=0))


def find_best_validation(series: Series) -> tuple[int, float] | None:
    """Returns the step and value of the lowest validation loss; the earliest of equals."""
    pairs = zip(series["val_loss"], series["step"], strict=True)
    evaluated = [(loss, int(step)) for loss, step in pairs if loss is not None and step is not None]
    evaluated = [(loss, step) for loss, step in evaluated if not math.isnan(loss)]
    if not evaluated:
        return None
    loss, step = min(evaluated)
    return step, loss


def read_largest_shares(out: Path) -> Series | None:
    """Returns the steps, and the largest share of a layer's routed tokens that one expert had; None without experts."""
    path = Path(out) / EXPERTS_FILE
    if not path.exists():
        return None
    with path.open(errors="replace") as file:
        columns = tuple(file.readline().rstrip("\n").split(","))
    rows = CsvFile(path, columns).read(MAX_POINTS)
    of_layers = [column for column in columns if column.startswith(LARGEST_SHARE)]
    largest = [max((row[column] or 0.0 for column in of_layers), default=None) for row in rows]
    return {"step": [row["step"] for row in rows], LARGEST_SHARE: largest}
