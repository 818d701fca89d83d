"""Layers of several windows by the hardware's kernel, for which plain attention stands in, against one plain method."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.analysis import verify
from shardformer.kernels import fused_attention
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.layout import mesh, resolve
from shardformer.model import Model
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
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / np.float32(np.sqrt(q.shape[-1]))
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = (distance >= 0) & (distance < (bounds.window or TOKENS))
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, logits, -1e30)), v)


def loss_and_grads(hardware=CPU, **overrides):
    config = shared.tiny(**SETTINGS | overrides)
    model = Model(resolve(config, hardware), mesh.make(config))
    params = jax.device_put(shared.drawn(config, 0), jax.tree.map(model.sharding, model.specs))
    run = jax.jit(lambda *args: model.loss_and_grad(*args))
    losses, grads = run(params, verify.random_batch(config), np.zeros(2, np.uint32))
    return shared.on_host((losses.loss, jax.tree.leaves(grads)))


@functools.cache
def compute_plainly(**overrides):
    return loss_and_grads(attention="plain", **overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"layers": 3, "remat": "dots"},
        {"layers": 3, "remat": "dots", "scan": False},
        {"mesh": "1x1x2", "accum": 2},
    ],
    ids=["layer-after-groups", "unrolled", "stages"],
)
def test_pattern_by_kernel_equals_plain_attention(overrides, monkeypatch):
    layers = overrides.get("layers", 4)
    expected_loss, expected = compute_plainly(layers=layers)
    _, other = compute_plainly(layers=layers, window_pattern="fw")
    monkeypatch.setattr(fused_attention, "attend_by_kernel", attend_plainly)
    loss, grads = loss_and_grads(Hardware("tpu"), attention="fused", **overrides)
    assert abs(loss / expected_loss - 1) < 1e-6
    assert max(map(asserts.relative, grads, expected)) < 1e-5
    assert max(map(asserts.relative, other, expected)) > 1e-3  # the twin: the other order of the same layers
