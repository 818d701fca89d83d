"""The metrics of a step; test_accumulation_exactly.py has them for each mode of accumulation."""

import functools

import jax
import numpy as np
import pytest

from shardformer.analysis import traced, verify_exact
from shardformer.training.step import StepMetrics
from tests import shared

OPTIONS = {"mesh": "4x2", "batch": 16, "layers": 1, "z_loss": 1e-2, "lr_rules": "embed=frozen"}


@functools.cache
def first_step() -> tuple[StepMetrics, dict, dict]:
    """Returns the metrics of one step in float64, and the parameters before and after it."""
    trainer = traced.make_trainer(shared.tiny(**OPTIONS))
    before = verify_exact.draw_parameters(trainer.config)
    state, [metrics] = verify_exact.run_steps(trainer, before, [shared.batch(0, rows=16)])
    return trainer.read_metrics(metrics), before, state.params


def test_update_norm_is_the_norm_of_the_change():
    metrics, before, after = first_step()
    changes = [np.ravel(x - y) for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)]
    assert metrics.update_norm == pytest.approx(np.linalg.norm(np.concatenate(changes)), rel=1e-10)


def test_metrics_report_the_rate_of_the_step():
    update = traced.make_trainer(shared.tiny(**OPTIONS)).update
    assert first_step()[0].lr == pytest.approx(float(update.learning_rate(np.int32(0))))
