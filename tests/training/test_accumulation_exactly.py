"""Each mode of accumulation takes the steps of one device with the full batch, in float64."""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.training.accumulation import AccumulatedGradient
from tests import shared

SIZES = {"layers": 1, "d_model": 16, "heads": 4, "d_ff": 16, "seq": 8, "batch": 8, "mesh": "2x1", "z_loss": 0.1}


EXPERTS = {
    "experts": 4, "bias": "none", "activation": "swiglu", "balance_loss": 0.1, "router_z_loss": 0.01,
    "balance_rate": 0.01, "mesh": "2x2", "accum": 2,
}  # fmt: skip


def run_two_steps(config):
    trainer = traced.make_trainer(config)
    return verify_exact.run_steps(trainer, verify_exact.draw_parameters(config), [verify_exact.draw_batch(trainer)] * 2)


run_on_one_device = functools.cache(run_two_steps)  # of the full batch, the same for every mode


@pytest.mark.parametrize("keys", [{"lr_rules": "embed=frozen"}, EXPERTS], ids=["plain", "experts"])
@pytest.mark.parametrize("mode", ["scan", "multisteps", "manual"])
def test_steps_are_those_of_the_full_batch(mode, keys):
    config = shared.tiny(**SIZES | {"accum": 4, "accum_mode": mode, "ema": 0.5, "clip": 0.1} | keys)
    rows = verify_exact.compare_states(run_two_steps(config), run_on_one_device(verify_exact.on_one_device(config)))
    assert [f"{row.name}: {row.relative:.1e}" for row in rows if not row.passes] == []


def test_step_that_is_left_out_leaves_no_gradient():
    trainer = traced.make_trainer(shared.tiny(**SIZES | {"accum": 4, "accum_mode": "multisteps"}))
    params = verify_exact.draw_parameters(trainer.config)
    state = exact.run(trainer.update.start, params, shapes=(trainer.model.shapes,)).outputs
    half = state._replace(optimizer=state.optimizer._replace(acc_grads=params, mini_step=np.int32(2)))
    after = exact.run(AccumulatedGradient().leave_out, half).outputs
    assert int(after.optimizer.mini_step) == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(after.optimizer.acc_grads))
