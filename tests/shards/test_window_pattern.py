"""Layers of several windows by the hardware's kernel, for which plain attention stands in, against one plain method."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from shardformer.devices.chips import CPU, Hardware
from shardformer.kernels import fused_attention
from shardformer.layout import mesh, resolve
from shardformer.training.trainer import Trainer
from tests import asserts, shared

TOKENS = 128  # the least that the TPU's kernel takes
SETTINGS = {
    "layers": 4, "seq": TOKENS, "batch": 4, "heads": 2, "kv_heads": 1, "d_model": 16, "d_ff": 16, "window": 20,
    "window_pattern": "wf", "window_rotary_theta": 100.0, "mesh": "1x1",
}  # fmt: skip


def attend_plainly(platform, q, k, v, documents, bounds):
    """The arithmetic of the kernel; a kernel takes only windows that are known while tracing."""
    assert platform == "tpu"
    assert bounds.window in (None, 20)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * np.float32(1 / np.sqrt(q.shape[-1]))
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = (distance >= 0) & (distance < (bounds.window or TOKENS))
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, logits, -1e30)), v)


def make_trainer(hardware=CPU, **overrides):
    """Returns a trainer, and the arguments of its gradients."""
    config = shared.tiny(**SETTINGS | overrides)
    trainer = Trainer(config, mesh.make(config), resolve(config, hardware))
    return trainer, verify_exact.draw_parameters(config), verify_exact.draw_batch(trainer), np.zeros(2, np.uint32)


@functools.cache
def compute_plainly(**overrides):
    return verify_exact.compute_gradients(*make_trainer(attention="plain", **overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {"layers": 3, "remat": "dots"},
        {"layers": 3, "remat": "dots", "scan": False},
        pytest.param({"mesh": "1x1x2", "accum": 2}, marks=pytest.mark.slow),
    ],
    ids=["layer-after-groups", "unrolled", "stages"],
)
def test_pattern_by_kernel_equals_plain_attention(overrides, monkeypatch):
    layers = overrides.get("layers", 4)
    expected = compute_plainly(layers=layers)
    other = compute_plainly(layers=layers, window_pattern="fw")
    monkeypatch.setattr(fused_attention, "attend_by_kernel", attend_plainly)
    got = verify_exact.compute_gradients(*make_trainer(Hardware("tpu"), attention="fused", **overrides))
    asserts.assert_gradients_equal(got, expected)
    # The twin has the layers in the other order.
    assert asserts.worst_relative(other.gradients, expected.gradients) > 1e-3


@pytest.mark.slow
def test_compiled_pattern_by_kernel_equals_plain_attention(monkeypatch):
    monkeypatch.setattr(fused_attention, "attend_by_kernel", attend_plainly)
    arguments = make_trainer(Hardware("tpu"), attention="fused", layers=3, remat="dots")
    asserts.assert_compiled_gradients_equal(*arguments, compute_plainly(layers=3))
