"""The bound on a step's loss and gradient norm, against numpy's median."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.config.training_keys import SKIP_LIMIT
from shardformer.training.rolling_guard import RollingGuard
from shardformer.training.step import Measured, StepMetrics, TrainState
from tests import shared


class ShortGuard(RollingGuard):
    window = 9


GUARD = ShortGuard(shared.tiny(skip_steps=4))


def take_steps(measured: list[tuple[float, float]]) -> tuple[list[bool], dict]:
    """Returns which steps of these (loss, gradient norm) are applied, and the last record."""
    state = TrainState(jnp.zeros((), jnp.int32), {}, {}, **GUARD.start({}))

    @jax.jit
    def take(state, metrics, step):
        measured = Measured(*metrics[:4])
        applied = jnp.isfinite(jnp.stack(measured)).all() & GUARD.accepts(state, measured) & (step == state.step)
        after = state._replace(step=state.step + applied.astype(jnp.int32))
        return GUARD.record(state, after, metrics, step, applied)[0], applied

    applied = []
    for step, (loss, norm) in enumerate(measured):
        metrics = StepMetrics(*map(jnp.float32, (loss, 0, 0, norm, 0, 0)))
        state, is_applied = take(state, metrics, np.int32(step))
        applied.append(bool(is_applied))
    return applied, jax.tree.map(np.asarray, state.guard)


def bound(values) -> float:
    deviation = 1.4826 * np.median(np.abs(values - np.median(values)))
    return np.median(values) + 4 * max(deviation, 0.01 * np.median(values))


@pytest.fixture
def window() -> np.ndarray:
    """Returns losses and norms that fill the window, shape [9, 2]."""
    return np.random.default_rng(0).uniform(1, 2, (9, 2))


@pytest.mark.parametrize("column", [0, 1])
def test_bound_is_that_of_numpy(window, column):
    just_below, just_above = np.median(window, 0), np.median(window, 0)
    just_below[column] = bound(window[:, column]) * 0.9999
    just_above[column] = bound(window[:, column]) * 1.0001
    assert take_steps([*window, just_below])[0][-1]
    assert not take_steps([*window, just_above])[0][-1]


def test_first_steps_have_no_bound(window):
    assert all(take_steps([*window[:8], (1e6, 1e6)])[0])


@pytest.mark.parametrize("bad", [(np.nan, 1.0), (1.0, np.inf)])
def test_non_finite_steps_are_never_applied(window, bad):
    assert take_steps([bad, *window])[0] == [False] + [True] * 9


def test_left_out_steps_do_not_move_the_bound(window):
    applied, record = take_steps([*window, (50, 1), (1.5, 50)])
    assert applied[-2:] == [False, False]
    np.testing.assert_array_equal(record["values"], window.T.astype(np.float32))
    assert (record["in_row"], record["skipped"], record["applied"]) == (2, 2, 9)


def test_no_step_is_applied_after_the_limit(window):
    applied, record = take_steps([*window, *[(50, 1)] * SKIP_LIMIT, *window])
    assert not any(applied[9:])
    assert (record["in_row"], record["skipped"]) == (SKIP_LIMIT, SKIP_LIMIT)


def test_oldest_values_leave_the_window(window):
    low = window / 10
    assert take_steps([*window, *low, (1.5, 0.15)])[0] == [True] * 18 + [False]


def test_values_that_hardly_vary_have_a_bound_above_them():
    """The deviation is at least a hundredth of the median: 4 of them are 4%."""
    equal = [(1.0, 1.0)] * 9
    assert take_steps([*equal, (1.03, 1.0), (1.0, 1.03)])[0][-2:] == [True, True]
    assert not take_steps([*equal, (1.05, 1.0)])[0][-1]
