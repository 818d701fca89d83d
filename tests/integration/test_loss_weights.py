"""Targets that do not count: no loss, no gradient, and one mean over the whole batch on every mesh."""

import jax
import numpy as np
import pytest

from tests import asserts, shared

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


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{"mesh": "4x2"}, {"mesh": "2x4", "accum": 4}], ids=str)
def test_one_mean_over_the_whole_batch(dense, overrides):
    losses, grads = losses_and_grads(WEIGHTS, **overrides)
    assert losses.loss == pytest.approx(dense[0].loss, rel=1e-6)
    assert losses.accuracy == pytest.approx(dense[0].accuracy, rel=1e-6)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(dense[1]), strict=True):
        assert asserts.relative(got, expected) < 1e-5


def test_it_is_the_mean_that_an_evaluation_gives(dense):
    trainer = shared.trainer(mesh="1x1")
    params = shared.initial_state(mesh="1x1").params
    sums = trainer.sums(params, shared.batch() | {"weights": WEIGHTS})
    assert dense[0].loss == pytest.approx(float(sums.nats / sums.tokens), rel=1e-6)
    plain = losses_and_grads(None, mesh="1x1")[0].loss
    assert plain != pytest.approx(dense[0].loss, rel=1e-4)  # so that the weights do something
