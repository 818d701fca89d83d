"""The metrics of a step; test_accumulation_exactly.py has them for each mode of accumulation."""

import functools

import jax
import numpy as np
import pytest

from shardformer.training.step import StepMetrics
from tests import shared

OPTIONS = {"mesh": "4x2", "batch": 16, "layers": 1, "z_loss": 1e-2, "lr_rules": "embed=frozen"}


@functools.cache
def first_step() -> tuple[StepMetrics, dict, dict]:
    """Returns the metrics of one step, and the parameters before and after it."""
    trainer = shared.trainer(**OPTIONS)
    state = trainer.init()
    before = shared.on_host(state.params)
    state, metrics = trainer.step(state, shared.batch(0, rows=16), 0)
    return trainer.read_metrics(metrics), before, shared.on_host(state.params)


def test_update_norm_is_the_norm_of_the_change():
    metrics, before, after = first_step()
    changes = [np.ravel(x - y) for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)]
    assert metrics.update_norm == pytest.approx(np.linalg.norm(np.concatenate(changes)), rel=1e-4)


def test_metrics_report_the_rate_of_the_step():
    trainer = shared.trainer(**OPTIONS)
    assert first_step()[0].lr == pytest.approx(float(trainer.update.learning_rate(np.int32(0))))
