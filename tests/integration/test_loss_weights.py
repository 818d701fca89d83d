"""Targets that do not count: no loss, no gradient, and one mean over the whole batch on every mesh."""

import jax
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from tests import meshes, shared

WEIGHTS = (np.random.RandomState(0).rand(8, 16) < 0.3).astype(np.float32)
WEIGHTS[3] = 0  # as a row of padding


def losses_and_grads(weights, **overrides):
    trainer = shared.trainer(**overrides)
    params = shared.initial_state(**overrides).params
    batch = trainer.to_devices(shared.batch() | ({} if weights is None else {"weights": weights}))
    return jax.tree.map(np.asarray, jax.jit(trainer.model.loss_and_grad)(params, batch, trainer.dropout_key(0)))


@pytest.fixture(scope="module")
def dense():
    return losses_and_grads(WEIGHTS, mesh="1x1")


@pytest.mark.parametrize(
    "overrides", [{"mesh": "4x2"}, {"mesh": "2x4", "accum": 4}, {"mesh": "8x1", "zero": 3}], ids=str
)
def test_one_mean_over_the_whole_batch(overrides):
    batch = shared.batch() | {"weights": WEIGHTS}
    params = verify_exact.draw_parameters(shared.tiny())
    got, one = (meshes.compute_gradients(shared.tiny(**keys), batch, params) for keys in (overrides, {"mesh": "1x1"}))
    meshes.assert_exact(verify_exact.compare(got, one, "one device"))
    assert got.run.outputs[0].accuracy == pytest.approx(float(one.run.outputs[0].accuracy), rel=meshes.EXACT)
    meshes.assert_exact(
        verify_exact.compare(got, verify_exact.compute_dense(shared.tiny(), params, batch, None), "dense")
    )


def test_it_is_the_mean_that_an_evaluation_gives(dense):
    trainer = shared.trainer(mesh="1x1")
    params = shared.initial_state(mesh="1x1").params
    sums = trainer.sums(params, shared.batch() | {"weights": WEIGHTS})
    assert dense[0].loss == pytest.approx(float(sums.nats / sums.tokens), rel=1e-6)
    plain = losses_and_grads(None, mesh="1x1")[0].loss
    assert plain != pytest.approx(dense[0].loss, rel=1e-4)  # so that the weights do something
