"""Attention of one shard against NumPy, both in float64, and once compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives, exact
from shardformer.kernels.attention import AttentionOptions, Cache, Plain
from shardformer.kernels.blockwise_attention import Blocks
from shardformer.shards.dropout import Dropout
from tests import asserts, sharded, shared

B, T, H, K = 2, 11, 4, 8
Q, KEYS, VALUES = (sharded.normal(seed, B, T, H, K) for seed in range(3))
BIAS_BY_DISTANCE = sharded.normal(3, H, T)
DOCUMENTS = np.tile(np.arange(T, dtype=np.int32) // 4, (B, 1))
POSITIONS = np.arange(T, dtype=np.int32)
DISTANCE = POSITIONS[:, None] - POSITIONS[None, :]
BIAS = BIAS_BY_DISTANCE[:, np.maximum(DISTANCE, 0)][None]
METHODS = [Plain(), Plain(groups=4), Blocks(block=4)]  # 4 divides no T
CAP = np.float32(0.7)
CLOSE = 1e-13


def attend_in_numpy(q, k, v, bias=0.0, documents=None, window=T, cap=None):
    """Repeats each key/value head for its query heads, row by row."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = np.broadcast_to((DISTANCE >= 0) & (window > DISTANCE), (B, 1, T, T))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    logits = np.einsum("bthk,bshk->bhts", q, k) * np.float32(1 / np.sqrt(K)) + bias
    logits = np.where(seen, np.tanh(logits / cap) * cap if cap else logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def make_options(method, documents=None):
    bias = BIAS_BY_DISTANCE if method.bias_by_distance else BIAS
    documents = None if documents is None else jnp.asarray(documents)
    return AttentionOptions(jnp.asarray(POSITIONS), bias=jnp.asarray(bias), documents_BT=documents)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_numpy(method, masked):
    documents = DOCUMENTS if masked else None
    options = make_options(method, documents)
    got = run_exactly(lambda *qkv: method.attend(*qkv, options), Q, KEYS, VALUES)
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, BIAS, documents)) < CLOSE
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, 0.0, documents)) > 1e-2
    assert asserts.relative(got, attend_in_numpy(Q, KEYS, VALUES, BIAS, None if masked else DOCUMENTS)) > 1e-2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", [1, 3, 5, T + 1])
def test_window_and_cap_are_those_of_numpy(method, window):
    """The window counts the own token, as transformers' sliding_window does; it is known to the compiler or not."""
    options = make_options(method, DOCUMENTS)._replace(window=window, cap=CAP)

    def of_layer(window, *qkv):
        return run_exactly(lambda w, *qkv: method.attend(*qkv, options._replace(window=w)), np.int32(window), *qkv)

    expected = attend_in_numpy(Q, KEYS, VALUES, BIAS, DOCUMENTS, window, CAP)
    assert asserts.relative(of_layer(window, Q, KEYS, VALUES), expected) < CLOSE
    assert asserts.relative(run_exactly(lambda *qkv: method.attend(*qkv, options), Q, KEYS, VALUES), expected) < CLOSE
    if window > 1:
        assert asserts.relative(attend_in_numpy(Q, KEYS, VALUES, BIAS, DOCUMENTS, window), expected) > 1e-2
    if window < 4:  # documents have four tokens
        assert asserts.relative(of_layer(window + 1, Q, KEYS, VALUES), expected) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_documents_of_equal_length(method):
    """A chunk is known to the compiler or not."""
    options = make_options(method)._replace(window=4, chunk=4)

    def of_layer(chunk, *qkv):
        changed = options._replace(window=chunk, chunk=chunk)
        return run_exactly(lambda *qkv: method.attend(*qkv, changed), *qkv)

    expected = attend_in_numpy(Q, KEYS, VALUES, BIAS, DOCUMENTS)  # of four tokens
    for chunk in (4, jnp.int32(4)):
        assert asserts.relative(of_layer(chunk, Q, KEYS, VALUES), expected) < CLOSE
    assert asserts.relative(of_layer(5, Q, KEYS, VALUES), expected) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_compiled_attention_is_the_exact_one(method):
    options = make_options(method, DOCUMENTS)._replace(window=5, cap=CAP)
    asserts.assert_compiled_is_exact(lambda *qkv: method.attend(*qkv, options), Q, KEYS, VALUES)


def dense_total(q, k, v, bias, keep, window, cap):
    """Sums weighted values of all pairs, for its gradient; `keep` is the mask of dropout at a rate of 0.3."""
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * np.float32(1 / np.sqrt(K)) + bias[:, np.maximum(DISTANCE, 0)][None]
    logits = jnp.tanh(logits / cap) * cap if cap else logits
    seen = ((DISTANCE >= 0) & (window > DISTANCE)) & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :])
    weights = jnp.where(keep, jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)) / np.float32(0.7), 0)
    return (jnp.einsum("bhts,bshk->bthk", weights, v) * VALUES[:, ::-1]).sum()


@pytest.mark.parametrize("method", METHODS)
def test_gradients_with_window_and_cap_equal_dense_ones(method):
    k, v = KEYS[:, :, :2], VALUES[:, :, :2]
    dropout = Dropout(0.3, jax.random.key(5), jnp.arange(B))

    def total(q, k, v, bias):
        bias = bias if method.bias_by_distance else bias[:, np.maximum(DISTANCE, 0)][None]
        options = make_options(method, DOCUMENTS)._replace(bias=bias, window=jnp.int32(3), cap=CAP, dropout=dropout)
        return (method.attend(q, k, v, options) * VALUES[:, ::-1]).sum()

    heads = (P(None, None, "mp"),) * 3 + (P("mp"),)
    got = sharded.on_mesh(jax.grad(total, (0, 1, 2, 3)), (1, 1), heads, heads)(Q, k, v, BIAS_BY_DISTANCE)

    def draw(example, head):
        key = jax.random.key(5)
        for index in (0, example, head):
            key = jax.random.fold_in(key, index)
        return jax.random.bernoulli(key, 0.7, (T, T))

    keep = np.array([[draw(example, head) for head in range(H)] for example in range(B)])

    def dense(window, cap):
        slope = jax.grad(functools.partial(dense_total, window=window, cap=cap), (0, 1, 2, 3))
        return run_exactly(slope, Q, k, v, BIAS_BY_DISTANCE, keep)

    assert asserts.worst_relative(got, dense(3, CAP)) < CLOSE
    for window, cap in ((2, CAP), (3, None)):
        other = dense(window, cap)
        assert min(map(asserts.relative, got, other)) > 1e-2


def gradients(method, k, v, repeats):
    """Differentiates attention whose key/value heads are copied `repeats` times before it."""
    options = make_options(method, DOCUMENTS)
    dropout = Dropout(0.3, jax.random.key(5), jnp.arange(B))

    def total(q, k, v):
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        of_shard = options._replace(bias=collectives.vary(options.bias, "mp"), dropout=dropout)
        return (method.attend(q, k, v, of_shard) * VALUES[:, ::-1]).sum()

    heads = (P(None, None, "mp"),) * 3
    return sharded.on_mesh(jax.grad(total, (0, 1, 2)), (1, 1), heads, heads)(Q, k, v)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("g", [1, 2])
def test_grouped_attention_equals_repeated_heads(method, g):
    k, v = KEYS[:, :, :g], VALUES[:, :, :g]
    options = make_options(method)
    got = run_exactly(lambda *qkv: method.attend(*qkv, options), Q, k, v)
    assert asserts.relative(got, attend_in_numpy(Q, k, v, BIAS)) < CLOSE
    assert asserts.worst_relative(gradients(method, k, v, 1), gradients(method, k, v, H // g)) < CLOSE


@pytest.mark.parametrize("method", METHODS)
def test_other_order_of_groups_gives_other_values(method):
    """The twin: query head i belongs to key/value head i // 2, not i % 2."""
    interleaved = gradients(method, KEYS[:, :, [0, 1, 0, 1]], VALUES[:, :, [0, 1, 0, 1]], 1)
    assert asserts.relative(gradients(method, KEYS[:, :, :2], VALUES[:, :, :2], 1)[0], interleaved[0]) > 1e-2


def temporary_bytes(layers, **overrides):
    config = {"mesh": "1x1", "heads": 8, "d_model": 64, "seq": 128, "layers": layers, "batch": 4, "attention": "plain"}
    model = shared.trainer(**config | overrides).model
    batch = {name: jax.ShapeDtypeStruct((4, 128), jnp.int32) for name in ("tokens", "targets")}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    compiled = jax.jit(model.loss_and_grad).lower(model.abstract, batch, key).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_layers_keep_only_grouped_keys_and_values():
    """test_backward_pass_keeps_grouped_heads_once compares attention in blocks by itself."""
    kept = [(temporary_bytes(6, kv_heads=g) - temporary_bytes(2, kv_heads=g)) / 4 for g in (8, 1)]
    keys_and_values = 2 * 4 * 4 * 128 * 64  # bytes of 4 rows of 128 tokens
    assert kept[0] - kept[1] > 0.9 * keys_and_values * 7 / 8


def kept_bytes(method, g, repeats=1):
    """Returns the bytes that the backward pass of attention keeps, of g key/value heads copied `repeats` times."""
    options = make_options(method)._replace(bias=None)

    def attended(q, k, v):
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        return method.attend(q, k, v, options)

    kept = jax.eval_shape(lambda *qkv: jax.vjp(attended, *qkv)[1], Q, KEYS[:, :, :g], VALUES[:, :, :g])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("method", [Plain(), Blocks(block=4)])  # no grouped heads in groups of queries
@pytest.mark.parametrize("g", [1, 2])
def test_backward_pass_keeps_grouped_heads_once(method, g):
    """The twin repeats the heads: it keeps as many bytes as a model without groups."""
    tokens = T + (-T % method.block if method != Plain() else 0)  # rows are padded to full blocks
    keys_and_values = 2 * 4 * B * tokens * H * K
    assert kept_bytes(method, H) - kept_bytes(method, g) == keys_and_values * (H - g) // H
    assert kept_bytes(method, g, repeats=H // g) == kept_bytes(method, H)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("free", [0, 3])
def test_cache_gives_the_last_row(groups, free):
    """The cache has `free` empty slots before the text, and one slot after it for the new token."""
    k, v = KEYS[:, :, : H // groups], VALUES[:, :, : H // groups]
    slots = ((0, 0), (0, 0), (free, 1), (0, 0))
    cache = Cache(*(np.pad(np.swapaxes(x[:, :-1], 1, 2), slots, constant_values=7.0) for x in (k, v)))
    position, slot = T - 1, free + T - 1
    bias_hS = np.pad(BIAS_BY_DISTANCE, ((0, 0), (0, free)))

    def attend(q, k, v, cache, bias_hS):
        options = AttentionOptions(jnp.arange(position, position + 1), bias=bias_hS, slot=slot)
        return Plain().attend_to_cache(q, k, v, cache, options)

    got, after = run_exactly(attend, *(x[:, -1:] for x in (Q, k, v)), cache, bias_hS)
    assert asserts.relative(got, attend_in_numpy(Q, k, v, BIAS)[:, -1:]) < CLOSE
    np.testing.assert_array_equal(after.k_BhSK[:, :, free:], np.swapaxes(k, 1, 2))
    np.testing.assert_array_equal(after.v_BhSK[:, :, free:], np.swapaxes(v, 1, 2))


@pytest.mark.parametrize("window", [1, 4])
def test_cache_of_a_window_is_a_ring(window):
    """The cache has as many slots as the window has tokens; each token replaces the one that left the window."""

    def step(cache, t):
        q, k, v = (lax.dynamic_slice_in_dim(x, t, 1, axis=1) for x in (Q, KEYS[:, :, :2], VALUES[:, :, :2]))
        bias = jnp.asarray(BIAS_BY_DISTANCE)
        options = AttentionOptions(t + jnp.arange(1), bias=bias, slot=t + 5, window=window, cap=CAP)
        values, cache = Plain().attend_to_cache(q, k, v, cache, options)
        return cache, values[:, 0]

    empty = jnp.full((B, 2, window, K), 7.0)  # a slot that no token has filled must not count
    _, rows = run_exactly(lambda: lax.scan(step, Cache(empty, empty), jnp.arange(T)))
    got = np.swapaxes(rows, 0, 1)
    k, v = KEYS[:, :, :2], VALUES[:, :, :2]
    assert asserts.relative(got, attend_in_numpy(Q, k, v, BIAS, None, window, CAP)) < CLOSE
    assert asserts.relative(got, attend_in_numpy(Q, k, v, BIAS, None, window + 1, CAP)) > 1e-2


@pytest.mark.parametrize(("groups", "share"), [(1, 1.0), (4, (3 * 3 + 3 * 6 + 3 * 9 + 2 * 11) / 11**2)])
def test_groups_keep_only_weights_of_keys_up_to_their_queries(groups, share):
    method = Plain(groups)
    options = make_options(method)._replace(bias=None)
    kept = jax.eval_shape(lambda *qkv: jax.vjp(lambda *qkv: method.attend(*qkv, options), *qkv)[1], Q, KEYS, VALUES)
    weights = [leaf.size for leaf in jax.tree.leaves(kept) if leaf.shape[:2] == (B, H) and leaf.shape[-1] > 1]
    assert sum(weights) > 0
    assert sum(weights) % round(B * H * T * T * share) == 0
