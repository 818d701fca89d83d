"""`gradients.csv`: how the gradients of single examples spread, at each logged step of a run with grad_metrics=true."""

from pathlib import Path

from shardformer.logs.csv_file import CsvFile
from shardformer.shards.example_norms import Noise


class GradientsFile:
    """Opened by the first write, which knows the columns; on resume it continues after the step of the checkpoint."""

    def __init__(self, out: Path, first_step: int):
        self._path = Path(out) / "gradients.csv"
        self._first_step = first_step
        self._file: CsvFile | None = None
        self._sums = Noise(0.0, 0.0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            file = CsvFile(self._path, ("step", *metrics, "noise_scale"))
            for row in file.begin(self._first_step):
                self._add(row)
            self._file = file
        self._add(metrics)
        # Both estimates are noisy and their ratio is noisier: the scale is the ratio of their means over the run.
        scale = self._sums.scale if self._sums.signal > 0 else None
        self._file.append({"step": step, **metrics, "noise_scale": scale})

    def _add(self, row: dict) -> None:
        self._sums = Noise(*(total + (row[f"noise_{name}"] or 0.0) for name, total in self._sums._asdict().items()))
