"""Documents in one row, masked, give what they give alone; unmasked they do not."""

import numpy as np
import pytest

from tests import meshes, shared

DOCUMENTS = np.repeat([0, 1, 3], [5, 8, 3])  # of 16 tokens
ROWS = shared.batch()
APART = [np.flatnonzero(document == DOCUMENTS) for document in np.unique(DOCUMENTS)]


def token_losses(overrides, *batches):
    """Nats of each target of batches of the same shapes, by evaluating one target of a row at a time."""
    only_one = np.eye(16, dtype=np.float32)
    parts = [batch | {"weights": np.tile(only_one[place], (8, 1))} for batch in batches for place in range(16)]
    sums = meshes.measure_sums(shared.tiny(**overrides), *parts)
    return np.array([float(each.nats) for each in sums]).reshape(len(batches), 16)


def apart(rows, places):
    """The rows' tokens at these places alone, from position 0 on, with padding after them."""
    return {name: np.pad(ids[:, places], ((0, 0), (0, 16 - len(places)))) for name, ids in rows.items()}


@pytest.mark.parametrize("positions", ["learned", "rotary", "t5"])
def test_packed_documents_are_as_if_apart(positions):
    overrides = {"positions": positions, "mesh": "2x1"}
    masked = ROWS | {"documents": np.tile(DOCUMENTS, (8, 1)).astype(np.int32)}
    *alone, unmasked = token_losses(overrides, *(apart(ROWS, places) for places in APART), ROWS)
    expected = np.concatenate([losses[: len(places)] for losses, places in zip(alone, APART, strict=True)])
    assert np.allclose(token_losses(overrides, masked)[0], expected, rtol=meshes.EXACT)
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
