"""A ring whose steps a TPU's kernel computes, interpreted on CPUs: the numbers of all pairs of tokens on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer.kernels.attention import AttentionOptions
from shardformer.parallel import ring_kernel
from shardformer.parallel.ring_attention import Ring
from tests import asserts, sharded

CP, WIDTH, CAP = 2, 16, 2.0
TOKENS = 2 * CP * 128  # the least chunks that the kernel takes
Q, FACTOR = (sharded.normal(seed, 1, 2, TOKENS, WIDTH) for seed in (0, 1))
K, V = (sharded.normal(seed, 1, 1, TOKENS, WIDTH) for seed in (2, 3))  # one head serves two
DOCUMENTS = np.cumsum(np.random.RandomState(5).rand(1, TOKENS) < 0.01, axis=1).astype(np.int32)


def attend_plainly(q, k, v):
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = (distance >= 0)[None, None] & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :])
    logits = jnp.einsum("bhtk,bgsk->bhts", q, k) / np.float32(np.sqrt(WIDTH))
    logits = np.float32(CAP) * jnp.tanh(logits / np.float32(CAP))
    return jnp.einsum("bhts,bgsk->bhtk", jax.nn.softmax(jnp.where(seen, logits, -1e30)), v)


def attend_in_ring(q, k, v):
    def body(q, k, v):
        ring = Ring(block=0)
        local = (ring.take_tokens(jnp.swapaxes(x, 1, 2)) for x in (q, k, v))
        return jnp.swapaxes(ring.attend(*local, AttentionOptions(None, cap=CAP, documents_BT=DOCUMENTS)), 1, 2)

    device_mesh = Mesh(np.array(jax.devices()[:CP]), ("cp",))
    values = jax.shard_map(body, mesh=device_mesh, in_specs=P(), out_specs=P(None, None, "cp"))(q, k, v)
    chunks = jnp.split(values, 2 * CP, axis=2)  # shard s holds chunk s and chunk 3 - s
    return jnp.concatenate([chunks[0], chunks[2], chunks[3], chunks[1]], axis=2)


def measure(attend):
    """Returns the sum of weighted values and its gradients in q, k and v."""
    return jax.jit(jax.value_and_grad(lambda *args: (attend(*args) * FACTOR).sum(), (0, 1, 2)))(Q, K, V)


def off_by(monkeypatch):
    """Returns the relative differences of the sum and of the gradients."""
    interpreted = functools.partial(ring_kernel.make_splash, interpret=True)
    monkeypatch.setattr(ring_kernel, "make_splash", interpreted)
    (found, gradients), (expected, exact) = measure(attend_in_ring), measure(attend_plainly)
    return abs(found / expected - 1), *map(asserts.relative, gradients, exact)


@pytest.mark.slow
def test_kernel_gives_the_numbers_of_one_device(monkeypatch):
    assert max(off_by(monkeypatch)) < 2e-6


@pytest.mark.slow
def test_a_pair_of_chunks_given_to_other_queries_is_detected(monkeypatch, broken):
    """The twin: every visitor counts as one that precedes this shard."""
    broken(ring_kernel, "_visitor_precedes", lambda step: lax.axis_index("cp") >= 0)
    assert min(off_by(monkeypatch)) > 1e-3
