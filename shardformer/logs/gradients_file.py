"""`gradients.csv`: the spread of per-example gradients at each logged step of a run with grad_metrics=true."""

from pathlib import Path

from shardformer.logs.csv_file import CsvFile
from shardformer.parallel.example_norms import Noise


class GradientsFile:
    """The file, opened by the first write, which knows the columns. On resume it continues after `first_step`."""

    def __init__(self, out: Path, first_step: int):
        self._path = Path(out) / "gradients.csv"
        self._first_step = first_step
        self._file: CsvFile | None = None
        self._sums = dict.fromkeys(Noise._fields, 0.0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            file = CsvFile(self._path, ("step", *metrics, "noise_scale"))
            for row in file.begin(self._first_step):
                self._add(row)
            self._file = file
        self._add(metrics)
        # Both estimates are noisy and their ratio is noisier, so the scale is the ratio of their means over the run.
        self._file.append({"step": step, **metrics, "noise_scale": self._compute_scale()})

    def _add(self, row: dict) -> None:
        for name in self._sums:
            self._sums[name] += row[f"noise_{name}"] or 0.0

    def _compute_scale(self) -> float | None:
        """Returns the noise scale, or None while the estimate of the squared gradient norm is not positive."""
        return self._sums["variance"] / self._sums["signal"] if self._sums["signal"] > 0 else None
