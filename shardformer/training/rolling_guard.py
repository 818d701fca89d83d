"""`skip_steps`: a bound on a step's loss and gradient norm from the last applied steps. On the devices; global view.

The record of the guard is a part of the training state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.config.training_keys import SKIP_LIMIT
from shardformer.model import TaskOnMesh
from shardformer.training.step import Measured, Part, StepMetrics, TrainState

NORMAL = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations
SMALLEST_DEVIATION = 0.01  # as a share of the median: a loss that hardly varies must not make every step an outlier


class Verdict(NamedTuple):
    """The metrics that skip_steps adds to a step's."""

    loss_bound: float
    grad_norm_bound: float
    in_row: float  # steps left out in a row, up to this one
    skipped: float  # steps left out in all

    @classmethod
    def read(cls, metrics: jax.Array) -> "Verdict":
        """Waits for a step, and returns the metrics behind those of every step."""
        first = len(StepMetrics._fields)
        return cls(*np.asarray(metrics)[first : first + len(cls._fields)].tolist())


class RollingGuard(Part):
    """The guard that leaves out steps whose loss or gradient norm is far above the median of the last ones."""

    window = 128  # last applied steps whose median and deviation are taken; until then there is no bound

    def __init__(self, config: Config):
        self._deviations = config.bad_steps.skip_steps

    def start(self, params) -> dict:
        return {"guard": self.start_record()}

    def specs(self, model: TaskOnMesh) -> dict:
        return {"guard": jax.tree.map(lambda _: P(), self.start_record())}

    def start_record(self) -> dict:
        """Returns the record before the first step, in NumPy: outside a program, jnp would compile its zeros."""
        counts = {name: np.zeros((), np.int32) for name in ("applied", "in_row", "skipped", "rollbacks")}
        # The step at which the run last went back, and the step of the checkpoint that it went back to.
        steps = {name: np.zeros((), np.int32) for name in ("went_back_at", "went_back_to")}
        return {"values": np.zeros((2, self.window), np.float32)} | counts | steps

    def accepts(self, state: TrainState, measured: Measured) -> jax.Array:
        """Returns whether to apply a step with these losses and this gradient norm.

        After SKIP_LIMIT left-out steps in a row no step is applied, because the run is about to go back.
        """
        below = (_select_watched(measured) <= self._find_bounds(state.guard)).all()
        return below & (state.guard["in_row"] < SKIP_LIMIT)

    def record(self, before: TrainState, after: TrainState, metrics, batch_step, applied) -> tuple[TrainState, tuple]:
        """Adds the step to the record and the verdict to the metrics.

        A left-out step counts as completed: it uses up its batch.
        """
        record = before.guard
        bounds = self._find_bounds(record)
        skipped = ~applied & (batch_step == before.step) & (record["in_row"] < SKIP_LIMIT)
        slot = record["applied"] % self.window
        values = record["values"].at[:, slot].set(_select_watched(metrics))
        one_if_applied, one_if_skipped = applied.astype(jnp.int32), skipped.astype(jnp.int32)
        record = record | {
            "values": jnp.where(applied, values, record["values"]),
            "applied": record["applied"] + one_if_applied,
            "in_row": jnp.where(applied, 0, record["in_row"] + one_if_skipped),
            "skipped": record["skipped"] + one_if_skipped,
        }
        counts = record["in_row"].astype(jnp.float32), record["skipped"].astype(jnp.float32)
        after = after._replace(step=after.step + one_if_skipped, guard=record)
        return after, (*metrics, *bounds, *counts)  # in the order of Verdict

    def _find_bounds(self, record: dict) -> jax.Array:
        """Returns the bounds of the loss and of the gradient norm, [2]; infinity until the window is full."""
        median = _take_median(record["values"])
        deviation = NORMAL * _take_median(jnp.abs(record["values"] - median[:, None]))
        bounds = median + self._deviations * jnp.maximum(deviation, SMALLEST_DEVIATION * jnp.abs(median))
        return jnp.where(record["applied"] < self.window, jnp.inf, bounds)


def _select_watched(metrics: Measured | StepMetrics) -> jax.Array:
    """Returns the loss and the gradient norm, [2]."""
    return jnp.stack([metrics.loss, metrics.grad_norm])


def _take_median(values: jax.Array) -> jax.Array:
    """Returns the upper median of each row."""
    return jnp.sort(values, axis=1)[:, values.shape[1] // 2]
