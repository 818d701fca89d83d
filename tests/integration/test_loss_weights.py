"""Targets that do not count: no loss, no gradient, and one mean over the whole batch on every mesh."""

import numpy as np
import pytest

from shardformer.analysis import verify_exact
from tests import meshes, shared

WEIGHTS = (np.random.RandomState(0).rand(8, 16) < 0.3).astype(np.float32)
WEIGHTS[3] = 0  # as a row of padding


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


def test_it_is_the_mean_that_an_evaluation_gives():
    config, weighted = shared.tiny(mesh="1x1"), shared.batch() | {"weights": WEIGHTS}
    (sums,) = meshes.measure_sums(config, weighted)
    loss = float(meshes.compute_gradients(config, weighted).loss)
    assert loss == pytest.approx(float(sums.nats / sums.tokens), rel=meshes.EXACT)
    plain = float(meshes.compute_gradients(config, shared.batch()).loss)
    assert plain != pytest.approx(loss, rel=1e-4)  # so that the weights do something
