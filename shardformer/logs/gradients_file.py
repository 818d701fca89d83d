"""`gradients.csv`: how the gradients of single examples spread, at each logged step of a run with grad_metrics=true."""

from pathlib import Path

from shardformer.logs.csv_file import Rows
from shardformer.shards.example_norms import Noise


class Gradients:
    """The file of one run; on resume it goes on after the step that the run goes on from.

    It is opened by the first write, which knows its columns: a run without grad_metrics has no use for it.
    """

    def __init__(self, out: Path, first_step: int):
        self._path = Path(out) / "gradients.csv"
        self._first_step = first_step
        self._rows: Rows | None = None
        self._sums = Noise(0.0, 0.0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._rows is None:
            rows = Rows(self._path, ("step", *metrics, "noise_scale"))
            for row in rows.begin(self._first_step):
                self._add(row)
            self._rows = rows
        self._add(metrics)
        # Either estimate is noisy, and a ratio of noisy numbers is worse: the scale is one of means over the run.
        scale = self._sums.scale if self._sums.signal > 0 else None
        self._rows.append({"step": step, **metrics, "noise_scale": scale})

    def _add(self, row: dict) -> None:
        self._sums = Noise(*(total + row[f"noise_{name}"] for name, total in self._sums._asdict().items()))
