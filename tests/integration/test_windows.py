"""Windows in some layers, on every kind of mesh, against one device's dense model."""

import jax
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from tests import asserts, meshes, shared, tiers

WINDOWED = {
    "layers": 4, "window": 5, "window_pattern": "wwf", "window_rotary_theta": 50.0, "rotary_scaling": "linear:4",
    "attention_cap": 0.8, "kv_heads": 4, "heads": 8, "init_std": None,
}  # fmt: skip
OTHER_MODELS = (
    {"window": 4},
    {"window_pattern": "wfw"},
    {"window_pattern": "", "window_rotary_theta": None},
    {"window_rotary_theta": None},
    {"rotary_scaling": ""},
    {"attention_cap": None},
)
CASES = (
    ("2x4", {"attention": "blocks", "sequence_parallel": True, "zero": 3}),
    ("1x2x2", {"attention": "blocks", "accum": 4, "pipeline_rounds": 2}),
    ("2x2x2", {"attention": "plain", "accum": 2, "scan": False, "remat": "full"}),
)
KEY = np.array([0, 7], np.uint32)  # of dropout


@pytest.mark.parametrize(("mesh", "options"), tiers.shorten(CASES, 2))
def test_windows_equal_the_dense_model(mesh, options):
    """With dropout and masked documents."""
    meshes.assert_equals_one_device(with_steps=False, mesh=mesh, dropout=0.1, documents="masked", **WINDOWED | options)


@pytest.mark.slow
def test_compiled_windows_equal_the_dense_model():
    (mesh, options), batch = (
        CASES[0],
        shared.batch() | {"documents": np.tile(np.arange(16, dtype=np.int32) // 11, (8, 1))},
    )
    t = shared.trainer(mesh=mesh, dropout=0.1, **WINDOWED | options)
    params = shared.drawn(t.config, 0)
    losses, grads = jax.jit(t.model.loss_and_grad)(jax.device_put(params, t.model.shardings), batch, KEY)
    expected = verify_exact.compute_dense(t.config, params, batch, KEY)
    assert abs(float(losses.loss) / float(expected.loss) - 1) < 1e-6
    asserts.assert_trees_close(shared.on_host(grads), expected.gradients, 1e-5)


@pytest.mark.parametrize("changes", OTHER_MODELS, ids=str)
def test_each_key_of_windows_changes_the_logits(changes):
    """The twin of the parity."""
    config = shared.tiny(mesh="1x1", **WINDOWED)
    params, tokens = verify_exact.draw_parameters(config), shared.batch()["tokens"][:1]
    got, expected = (meshes.compute_logits(c, params, tokens) for c in (config.replace(**changes), config))
    assert asserts.relative(got, expected) > 1e-2
