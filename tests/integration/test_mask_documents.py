"""Documents in one row, masked, give what they give alone; unmasked they do not."""

import numpy as np
import pytest

from tests import meshes, shared

DOCUMENTS = np.repeat([0, 1, 3], [5, 8, 3])  # of 16 tokens
ROWS = shared.batch()
APART = [np.flatnonzero(document == DOCUMENTS) for document in np.unique(DOCUMENTS)]


def token_losses(batch, overrides):
    """Nats of each target, by evaluating one target of a row at a time."""
    only_one = np.eye(16, dtype=np.float32)
    batches = [batch | {"weights": np.tile(only_one[place], (8, 1))} for place in range(16)]
    return np.array([float(sums.nats) for sums in meshes.measure_sums(shared.tiny(**overrides), *batches)])


def apart(rows, places):
    """The rows' tokens at these places alone, from position 0 on, with padding after them."""
    return {name: np.pad(ids[:, places], ((0, 0), (0, 16 - len(places)))) for name, ids in rows.items()}


@pytest.mark.parametrize("positions", ["learned", "rotary", "t5"])
def test_packed_documents_are_as_if_apart(positions):
    overrides = {"positions": positions, "mesh": "4x2"}
    masked = ROWS | {"documents": np.tile(DOCUMENTS, (8, 1)).astype(np.int32)}
    expected = np.concatenate([token_losses(apart(ROWS, places), overrides)[: len(places)] for places in APART])
    assert np.allclose(token_losses(masked, overrides), expected, rtol=meshes.EXACT)
    unmasked = token_losses(ROWS, overrides)
    assert np.allclose(unmasked[:5], expected[:5], rtol=meshes.EXACT)
    assert not np.allclose(unmasked[5:], expected[5:], rtol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"mesh": "2x4", "accum": 2, "positions": "learned"},
        {"mesh": "dp2.cp2.mp2", "positions": "rotary"},  # and learned in test_context_parallel.py
        {"mesh": "dp2.cp2.mp2", "positions": "t5"},
        {"mesh": "4x1x2", "accum": 2, "positions": "t5"},
    ],
    ids=str,
)
def test_gradients_of_documents_equal_one_device(keys):
    meshes.assert_equals_one_device(with_steps=False, documents="masked", **keys)
