"""The bound on a step's loss and gradient norm, against numpy's median."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.guard import judge, note, start_record
from shardformer.training.update import TrainState
from tests import shared

CONFIG = shared.tiny(skip_steps=4, skip_window=9, skip_limit=3)


def take_steps(measured: list[tuple[float, float]]) -> tuple[list[bool], dict]:
    """Returns which steps of these (loss, gradient norm) are applied, and the last record."""
    state = TrainState(*[jnp.zeros((), jnp.int32), *[{}] * 4, start_record(CONFIG)])

    @jax.jit
    def take(state, metrics, step):
        sound = judge(state.guard, metrics[:4], CONFIG) & (step == state.step)
        after = state._replace(step=state.step + sound.astype(jnp.int32))
        return note(state, after, metrics, step, sound, CONFIG)[0], sound

    applied = []
    for step, (loss, norm) in enumerate(measured):
        state, sound = take(state, jnp.array([loss, 0.0, 0.0, norm, 0.0, 0.0]), np.int32(step))
        applied.append(bool(sound))
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
    applied, record = take_steps([*window, *[(50, 1)] * 3, *window])
    assert not any(applied[9:])
    assert (record["in_row"], record["skipped"]) == (3, 3)


def test_oldest_values_leave_the_window(window):
    low = window / 10
    assert take_steps([*window, *low, (1.5, 0.15)])[0] == [True] * 18 + [False]
