"""`metrics.csv`: one row for each logged step. It is the record of a run: all pictures are drawn from it."""

import math
from pathlib import Path

from shardformer.errors import RunError
from shardformer.logs.csv_file import CsvFile

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
    "data_s",  # and for batches
    "val_nats_per_byte",
    "val_bits_per_byte",
    "peak_bytes",  # the most memory so far, of the fullest device; of the process where devices do not tell (CPU)
    "mfu",  # model FLOPs over the chips' peak; empty where the chip is not in chips.py, as a CPU
)


def open_metrics_file(out: Path) -> CsvFile:
    return CsvFile(Path(out) / "metrics.csv", COLUMNS)


def find_elapsed_seconds(rows: list[dict[str, float | None]]) -> float:
    """How long a run had taken at its last row; a value that cannot be a time counts as none."""
    elapsed = [row["elapsed_s"] for row in rows if row["elapsed_s"] is not None]
    return elapsed[-1] if elapsed and 0 <= elapsed[-1] < 1e10 else 0.0


def read_metrics(out: Path) -> dict[str, list[float | None]]:
    """The columns of a run's metrics.csv; None where a step has no such number."""
    try:
        rows = open_metrics_file(out).read()
    except FileNotFoundError:
        raise RunError(f"{out} has no metrics.csv; is it the folder of a run?") from None
    return {column: [row[column] for row in rows] for column in COLUMNS}


def find_best_validation(series: dict[str, list[float | None]]) -> tuple[int, float] | None:
    """Step and value of the lowest validation loss, the earliest of equals."""
    pairs = zip(series["val_loss"], series["step"], strict=True)
    evaluated = [(loss, int(step)) for loss, step in pairs if loss is not None and not math.isnan(loss)]
    if not evaluated:
        return None
    loss, step = min(evaluated)
    return step, loss
