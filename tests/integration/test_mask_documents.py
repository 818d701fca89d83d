"""Documents in one row, masked, give what they give alone; unmasked they do not."""

import jax
import numpy as np
import pytest

from tests import asserts, shared

DOCUMENTS = np.repeat([0, 1, 3], [5, 8, 3])  # of 16 tokens
ROWS = shared.batch()
APART = [np.flatnonzero(document == DOCUMENTS) for document in np.unique(DOCUMENTS)]


def token_losses(batch, overrides):
    """Nats of each target, by evaluating one target of a row at a time."""
    trainer = shared.trainer(**overrides)
    params = shared.initial_state(**overrides).params
    nats = []
    for place in range(16):
        weights = np.zeros((8, 16), np.float32)
        weights[:, place] = 1
        nats.append(float(trainer.sums(params, batch | {"weights": weights}).nats))
    return np.array(nats)


def apart(rows, places):
    """The rows' tokens at these places alone, from position 0 on, with padding after them."""
    return {name: np.pad(ids[:, places], ((0, 0), (0, 16 - len(places)))) for name, ids in rows.items()}


@pytest.mark.parametrize("positions", ["learned", "rotary", "t5"])
def test_packed_documents_are_as_if_apart(positions):
    overrides = {"positions": positions, "mesh": "4x2"}
    masked = ROWS | {"documents": np.tile(DOCUMENTS, (8, 1)).astype(np.int32)}
    expected = np.concatenate([token_losses(apart(ROWS, places), overrides)[: len(places)] for places in APART])
    assert np.allclose(token_losses(masked, overrides), expected, rtol=1e-5)
    unmasked = token_losses(ROWS, overrides)
    assert np.allclose(unmasked[:5], expected[:5], rtol=1e-5)
    assert not np.allclose(unmasked[5:], expected[5:], rtol=1e-5)


@pytest.mark.slow
def test_the_gradient_is_the_same_on_every_mesh():
    batch = ROWS | {"documents": np.tile(DOCUMENTS, (8, 1)).astype(np.int32), "weights": np.ones((8, 16), np.float32)}
    grads = []
    for overrides in ({"mesh": "1x1", "positions": "learned"}, {"mesh": "2x4", "positions": "learned", "accum": 2}):
        trainer = shared.trainer(**overrides)
        params = shared.initial_state(**overrides).params
        loss_and_grad = jax.jit(trainer.model.loss_and_grad)
        grads.append(loss_and_grad(params, trainer.to_devices(batch), trainer.dropout_key(0))[1])
    for got, expected in zip(*map(jax.tree.leaves, grads), strict=True):
        assert asserts.relative(got, expected) < 1e-5
