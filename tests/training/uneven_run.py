"""A run whose intervals of logging, evaluating and saving do not divide each other, and reading what it wrote."""

from shardformer import checkpoint
from tests import runs

STEPS = 40


def uneven_words(text, steps: int = STEPS):
    """Returns the words of the run; `text` is its corpus."""
    return ("tiny", "mesh=4x2", f"data={text}", f"steps={steps}", "dropout=0.2", "log_every=3", "eval_every=7",
            "eval_batches=2", "save_every=9", "lr=1e-2")  # fmt: skip


def plain_words(text):
    """Returns the words of a run with the compiled programs of the uneven one, and the intervals of `tiny`."""
    return "tiny", "mesh=4x2", f"data={text}", "dropout=0.2", "lr=1e-2"


def contents(out, step: int = STEPS) -> bytes:
    """Returns the bytes of a checkpoint's arrays."""
    return (checkpoint.step_folder(out, step) / "arrays.npy").read_bytes()


def losses(out) -> dict[int, float]:
    """Returns the loss of every logged step."""
    return {int(row["step"]): float(row["loss"]) for row in runs.rows(out)}
