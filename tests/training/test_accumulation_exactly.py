"""Each mode of accumulation takes the steps of one device with the full batch, in float64."""

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
    "balance_rate": 0.01, "mesh": "2x2",
}  # fmt: skip


@pytest.mark.parametrize("keys", [{"lr_rules": "embed=frozen"}, EXPERTS], ids=["plain", "experts"])
@pytest.mark.parametrize("mode", ["scan", "multisteps", "manual"])
def test_steps_are_those_of_the_full_batch(mode, keys):
    config = shared.tiny(**SIZES | {"accum": 4, "accum_mode": mode, "ema": 0.5, "clip": 0.1} | keys)
    trainer, single = traced.make_trainer(config), traced.make_trainer(verify_exact.on_one_device(config))
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(trainer)
    steps = verify_exact.run_steps(trainer, params, [batch] * 2), verify_exact.run_steps(single, params, [batch] * 2)
    rows = verify_exact.compare_states(*steps)
    assert [f"{row.name}: {row.relative:.1e}" for row in rows if not row.passes] == []


def test_step_that_is_left_out_leaves_no_gradient():
    trainer = traced.make_trainer(shared.tiny(**SIZES | {"accum": 4, "accum_mode": "multisteps"}))
    params = verify_exact.draw_parameters(trainer.config)
    state = exact.run(trainer.update.start, params, shapes=(trainer.model.shapes,)).outputs
    half = state._replace(optimizer=state.optimizer._replace(acc_grads=params, mini_step=np.int32(2)))
    after = exact.run(AccumulatedGradient().leave_out, half).outputs
    assert int(after.optimizer.mini_step) == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(after.optimizer.acc_grads))
