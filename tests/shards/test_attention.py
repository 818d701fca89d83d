"""Attention of one shard against numpy in float64, and the choice of its method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels.fused_attention import CPU
from shardformer.shards.attention import AttentionContext, Cache, Method, attend, attend_to_cache, choose_method
from tests import asserts, sharded, shared

B, T, H, K = 2, 11, 4, 8
Q, KEYS, VALUES = (sharded.normal(seed, B, T, H, K) for seed in range(3))
BIAS_BY_DISTANCE = sharded.normal(3, H, T)
DOCUMENTS = np.tile(np.arange(T, dtype=np.int32) // 4, (B, 1))
POSITIONS = np.arange(T, dtype=np.int32)
DISTANCE = POSITIONS[:, None] - POSITIONS[None, :]
BIAS = BIAS_BY_DISTANCE[:, np.maximum(DISTANCE, 0)][None]


def attend_in_numpy(q, k, v, bias=0.0, documents=None):
    """Repeats each key/value head for its query heads, row by row."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = np.broadcast_to(DISTANCE >= 0, (B, 1, T, T))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    logits = np.where(seen, np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K) + bias, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_numpy(block, masked):
    documents = DOCUMENTS if masked else None
    bias = BIAS_BY_DISTANCE if block else BIAS
    context = AttentionContext(jnp.asarray(POSITIONS), jnp.asarray(POSITIONS), bias, documents, Method(block=block))
    got = jax.jit(lambda *qkv: attend(*qkv, context, None))(Q, KEYS, VALUES)
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, BIAS, documents)) < 1e-6
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, 0.0, documents)) > 1e-2
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, BIAS, None if masked else DOCUMENTS)) > 1e-2


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("free", [0, 3])
def test_cache_gives_the_last_row(groups, free):
    """The cache has `free` empty slots before the text, and one slot after it for the new token."""
    k, v = KEYS[:, :, : H // groups], VALUES[:, :, : H // groups]
    slots = ((0, 0), (0, 0), (free, 1), (0, 0))
    cache = Cache(*(jnp.pad(jnp.swapaxes(x[:, :-1], 1, 2), slots, constant_values=7.0) for x in (k, v)))
    position, slot = T - 1, free + T - 1
    key_S = position - slot + jnp.arange(free + T)
    bias_1h1S = jnp.asarray(BIAS_BY_DISTANCE)[:, np.clip(position - key_S, 0, T - 1)][None, :, None]
    context = AttentionContext(jnp.arange(T - 1, T), key_S, bias_1h1S, slot=slot)
    got, after = attend_to_cache(*(jnp.asarray(x[:, -1:]) for x in (Q, k, v)), cache, context)
    assert asserts.relative(got, attend_in_numpy(Q, k, v, BIAS)[:, -1:]) < 1e-6
    np.testing.assert_array_equal(after.k_BhSK[:, :, free:], np.swapaxes(k, 1, 2))
    np.testing.assert_array_equal(after.v_BhSK[:, :, free:], np.swapaxes(v, 1, 2))


@pytest.mark.parametrize(
    ("attention", "tokens", "method"),
    [
        ("auto", 1023, Method()),
        ("auto", 1024, Method(block=64)),
        ("blocks", 512, Method(block=64)),
        ("plain", 2048, Method()),
    ],
)
def test_auto_takes_blocks_from_1024_tokens(attention, tokens, method):
    config = shared.tiny(attention=attention, seq=2048)
    assert choose_method(config, CPU, tokens, dropout=False, documents=False) == method
