"""`skipped.csv`: the steps that skip_steps left out, with the bounds that they exceeded."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardformer.config import Config
from shardformer.guard.going_back import Stuck
from shardformer.guard.rolling_bound import VERDICT
from shardformer.logs.csv_file import CsvFile

COLUMNS = ("step", "loss", "grad_norm", *VERDICT)


class SkipLog:
    """The verdicts of the guard. Only the first process writes the file; on resume it continues after `first_step`."""

    def __init__(self, records: Path | None, first_step: int, config: Config, say: Callable[[str], None]):
        self._config, self._say, self._file = config, say, None
        if records and config.skip_steps:
            self._file = CsvFile(records / "skipped.csv", COLUMNS)
            self._file.begin(first_step)

    def take(self, row: dict, metrics: jax.Array, record: dict, explain: Callable[[], str]) -> dict:
        """Returns a step's metrics for metrics.csv; logs the step if it was left out.

        Raises Stuck if the run must go back. `record` is the guard's, `explain` names what was not finite.
        """
        verdict = dict(zip(VERDICT, np.asarray(metrics)[-len(VERDICT) :].tolist(), strict=True))
        if not verdict["in_row"]:
            return row
        problem = self._describe(row, verdict, explain)
        self._say(f"step {row['step']} is left out, {verdict['skipped']:.0f} so far: {problem}")
        if self._file:
            self._file.append({"step": row["step"], "loss": row["loss"], "grad_norm": row["grad_norm"]} | verdict)
        if verdict["in_row"] >= self._config.skip_limit:
            raise Stuck(row["step"], jax.tree.map(np.asarray, record))
        return {name: value if math.isfinite(value) else None for name, value in row.items()}

    @staticmethod
    def _describe(row: dict[str, Any], verdict: dict[str, float], explain: Callable[[], str]) -> str:
        if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
            return f"loss is {row['loss']}, grad_norm is {row['grad_norm']}{explain()}"
        above = [name for name in ("loss", "grad_norm") if row[name] > verdict[f"{name}_bound"]]
        return ", ".join(f"{name} is {row[name]:.4g}, its bound {verdict[f'{name}_bound']:.4g}" for name in above)
