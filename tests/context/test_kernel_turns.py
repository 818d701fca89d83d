"""A ring whose turns a TPU's kernel computes, interpreted on CPUs: the numbers of all pairs of tokens on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer.context import kernel_turns, split_attention, zigzag
from shardformer.errors import UsageError
from shardformer.kernels.blockwise_attention import Sight
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.shards.attention import Method, choose_method, find_ring_obstacle
from tests import asserts, sharded, shared

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
        own = (jnp.swapaxes(zigzag.take_own(jnp.swapaxes(x, 1, 2), CP), 1, 2) for x in (q, k, v))
        return split_attention.attend_in_context("ring", *own, Sight(documents_BT=DOCUMENTS), 0, 0.0, CAP)

    device_mesh = Mesh(np.array(jax.devices()[:CP]), ("cp",))
    values = jax.shard_map(body, mesh=device_mesh, in_specs=P(), out_specs=P(None, None, "cp"))(q, k, v)
    chunks = jnp.split(values, 2 * CP, axis=2)  # shard s holds chunk s and chunk 3 - s
    return jnp.concatenate([chunks[0], chunks[2], chunks[3], chunks[1]], axis=2)


def measure(attend):
    """Returns the sum of weighted values and its gradients in q, k and v."""
    return jax.jit(jax.value_and_grad(lambda *args: (attend(*args) * FACTOR).sum(), (0, 1, 2)))(Q, K, V)


def off_by(monkeypatch):
    """Returns the relative differences of the sum and of the gradients."""
    interpreted = functools.partial(kernel_turns.make_splash, interpret=True)
    monkeypatch.setattr(kernel_turns, "make_splash", interpreted)
    (found, gradients), (expected, exact) = measure(attend_in_ring), measure(attend_plainly)
    return abs(found / expected - 1), *map(asserts.relative, gradients, exact)


@pytest.mark.slow
def test_kernel_gives_the_numbers_of_one_device(monkeypatch):
    assert max(off_by(monkeypatch)) < 2e-6


@pytest.mark.slow
def test_a_pair_of_chunks_given_to_other_queries_is_seen(monkeypatch):
    """The twin: every visitor counts as one that precedes this shard."""
    monkeypatch.setattr(kernel_turns, "_visitor_precedes", lambda turn: lax.axis_index("cp") >= 0)
    assert min(off_by(monkeypatch)) > 1e-3


TPU = Hardware("tpu")
SPLIT = {"mesh": "dp1.cp2.mp1", "seq": 512, "d_model": 512, "heads": 4, "dtype": "bfloat16"}


def test_a_tpu_computes_a_ring_by_its_kernel():
    assert choose_method(shared.tiny(**SPLIT), TPU, 256, False, True) == Method(kernel="tpu", way="ring")
    assert choose_method(shared.tiny(**SPLIT), CPU, 256, False, True).block


@pytest.mark.parametrize(
    ("changes", "hardware", "tokens", "words"),
    [
        ({}, CPU, 256, "only a TPU"),
        ({"window": 100}, TPU, 256, "no window"),
        ({"context_parallel": "gather"}, TPU, 256, "context_parallel=gather"),
        ({"positions": "t5"}, TPU, 256, "positions=t5"),
        ({}, TPU, 128, "got 64"),  # tokens of a chunk
    ],
)
def test_obstacle_of_a_ring_of_kernels_is_named(changes, hardware, tokens, words):
    config = shared.tiny(**SPLIT | changes)
    assert words in find_ring_obstacle(config, hardware, tokens, False, False)
    assert choose_method(config, hardware, tokens, False, False).block
    with pytest.raises(UsageError, match=f"attention=fused.*{words}.*; give attention=auto"):
        choose_method(config.replace(attention="fused"), hardware, tokens, False, False)
