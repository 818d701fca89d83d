"""Windows in some layers, on every kind of mesh, against one device's dense model."""

import functools

import jax
import numpy as np
import pytest

from shardformer.analysis import dense_reference as reference
from tests import asserts, shared

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


def documents():
    return shared.batch() | {"documents": np.tile(np.arange(16, dtype=np.int32) // 11, (8, 1))}


@functools.cache
def dense():
    """Returns the loss and the gradients of one device's model with dropout."""
    config = shared.tiny(mesh="1x1", dropout=0.1, **WINDOWED)
    compute = jax.jit(functools.partial(reference.losses_and_gradients, config))
    (nats, _), grads = compute(shared.drawn(config, 0), documents(), KEY)
    return float(nats), shared.on_host(grads)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_windows_equal_the_dense_model(mesh, options):
    t = shared.trainer(mesh=mesh, dropout=0.1, **WINDOWED | options)
    params = jax.device_put(shared.drawn(t.config, 0), t.model.shardings)
    losses, grads = jax.jit(t.model.loss_and_grad)(params, documents(), KEY)
    loss, expected = dense()
    assert abs(float(losses.loss) / loss - 1) < 1e-6
    asserts.assert_trees_close(shared.on_host(grads), expected, 1e-5)


@pytest.mark.parametrize("changes", OTHER_MODELS, ids=str)
def test_each_key_of_windows_changes_the_logits(changes):
    """The twin of the parity."""
    config = shared.tiny(mesh="1x1", **WINDOWED)
    params, tokens = shared.drawn(config, 0), shared.batch()["tokens"][:1]
    got, expected = (reference.logits(c, params, tokens) for c in (config.replace(**changes), config))
    assert asserts.relative(got, expected) > 1e-2
