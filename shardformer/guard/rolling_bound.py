"""The bound on a step's loss and gradient norm, from the last applied steps. Runs on the devices; global view.

The record of the guard is a part of the training state. It is empty without skip_steps.
"""

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.config import Config

NORMAL = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations
SMALLEST_DEVIATION = 0.01  # as a share of the median: a loss that hardly varies must not make every step an outlier
VERDICT = ("loss_bound", "grad_norm_bound", "in_row", "skipped")  # the metrics that skip_steps adds to a step's


def start_record(config: Config) -> dict:
    """Returns the record before the first step, in NumPy: outside a program, jnp would compile its zeros."""
    if not config.skip_steps:
        return {}
    counts = {name: np.zeros((), np.int32) for name in ("applied", "in_row", "skipped", "rollbacks")}
    # The step at which the run last went back, and the step of the checkpoint that it went back to.
    places = {name: np.zeros((), np.int32) for name in ("went_back_at", "went_back_to")}
    return {"values": np.zeros((2, config.skip_window), np.float32)} | counts | places


def judge(record: dict, measured: jax.Array, config: Config) -> jax.Array:
    """Returns whether to apply a step with these losses and this gradient norm.

    After skip_limit left-out steps in a row no step is applied, because the run is about to go back.
    """
    finite = jnp.isfinite(measured).all()
    if not record:
        return finite
    below = (_select_watched(measured) <= _find_bounds(record, config)).all()
    return finite & below & (record["in_row"] < config.skip_limit)


def note(before, after, metrics: jax.Array, batch_step, applied, config: Config):
    """Returns the training state with an updated record, and the metrics with the verdict.

    `before` and `after` are the states around the step. A left-out step counts as completed: it uses up its batch.
    """
    record = before.guard
    if not record:
        return after, metrics
    bounds = _find_bounds(record, config)
    skipped = ~applied & (batch_step == before.step) & (record["in_row"] < config.skip_limit)
    slot = record["applied"] % config.skip_window
    values = record["values"].at[:, slot].set(_select_watched(metrics))
    one_if_applied, one_if_skipped = applied.astype(jnp.int32), skipped.astype(jnp.int32)
    record = record | {
        "values": jnp.where(applied, values, record["values"]),
        "applied": record["applied"] + one_if_applied,
        "in_row": jnp.where(applied, 0, record["in_row"] + one_if_skipped),
        "skipped": record["skipped"] + one_if_skipped,
    }
    counts = jnp.stack([record["in_row"], record["skipped"]]).astype(jnp.float32)
    return after._replace(step=after.step + one_if_skipped, guard=record), jnp.concatenate([metrics, bounds, counts])


def _select_watched(metrics: jax.Array) -> jax.Array:
    """Returns the loss and the gradient norm, [2]."""
    return metrics[jnp.array([0, 3])]


def _find_bounds(record: dict, config: Config) -> jax.Array:
    """Returns the bounds of the loss and of the gradient norm, [2]; infinity until the window is full."""
    median = _take_median(record["values"])
    deviation = NORMAL * _take_median(jnp.abs(record["values"] - median[:, None]))
    bounds = median + config.skip_steps * jnp.maximum(deviation, SMALLEST_DEVIATION * jnp.abs(median))
    return jnp.where(record["applied"] < config.skip_window, jnp.inf, bounds)


def _take_median(values: jax.Array) -> jax.Array:
    """Returns the upper median of each row."""
    return jnp.sort(values, axis=1)[:, values.shape[1] // 2]
