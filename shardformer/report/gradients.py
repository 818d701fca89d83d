"""`gradients.csv`: how the gradients of single examples spread, at each logged step of a run with grad_metrics=true."""

import csv
from pathlib import Path

from shardformer.files import replacing
from shardformer.optim.example_norms import Noise


class Gradients:
    """The file of one run; on resume it goes on after the step that the run goes on from."""

    def __init__(self, out: Path, first_step: int):
        self._path = out / "gradients.csv"
        self._rows = [row for row in _read(self._path) if int(row["step"]) <= first_step]

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._rows.append({"step": step, **metrics})
        # Either estimate is noisy, and a ratio of noisy numbers is worse: the scale is one of means over the run.
        noise = Noise(*(sum(float(row[f"noise_{name}"]) for row in self._rows) for name in Noise._fields))
        self._rows[-1]["noise_scale"] = noise.scale if noise.signal > 0 else ""
        with replacing(self._path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._rows[-1])
            writer.writeheader()
            writer.writerows(self._rows)


def _read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
