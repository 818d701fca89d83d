"""Attention in blocks: the numbers of plain attention in float64, its dropout masks bit for bit, and linear memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import verify_exact
from shardformer.kernels import blockwise_attention
from shardformer.kernels.blockwise_attention import Mask
from tests import asserts, sharded, shared

KEYS = jax.random.key_data(jax.random.key(3))[None, None]
CASES = {"plain": {}, "dropout, T5": {"dropout": 0.2, "positions": "t5", "block": "sequential"}}


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_those_of_bernoulli_bit_for_bit(rate):
    whole = np.asarray(jax.random.bernoulli(jax.random.key(3), 1 - rate, (48, 48)))
    part = blockwise_attention.keep_mask(KEYS, rate, jnp.arange(16, 32), jnp.arange(8, 40), 48)[0, 0]
    np.testing.assert_array_equal(part, whole[16:32, 8:40])
    assert (np.asarray(part) != whole[15:31, 8:40]).any()


def make_trainer(batch, **overrides):
    """Returns a trainer, and the arguments of its gradients."""
    t = shared.trainer(**overrides)
    return t, verify_exact.draw_parameters(t.config), batch, np.zeros(2, np.uint32)


def compute_gradients(batch, **overrides):
    return verify_exact.compute_gradients(*make_trainer(batch, **overrides))


def documents():
    return shared.batch() | {"documents": np.tile(np.arange(16, dtype=np.int32) // 6, (8, 1))}


@pytest.mark.parametrize(("name", "make_batch"), [("plain", documents), ("dropout, T5", shared.batch)])
def test_blocks_equal_plain_attention_on_another_mesh(name, make_batch):
    expected = compute_gradients(make_batch(), mesh="1x1", attention="plain", **CASES[name])
    got = compute_gradients(make_batch(), mesh="2x4", attention="blocks", **CASES[name])
    asserts.assert_gradients_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make_batch"), [("plain", documents), ("dropout, T5", shared.batch)])
def test_compiled_blocks_equal_plain_attention_on_another_mesh(name, make_batch):
    expected = compute_gradients(make_batch(), mesh="1x1", attention="plain", **CASES[name])
    arguments = make_trainer(make_batch(), mesh="2x4", attention="blocks", **CASES[name])
    asserts.assert_compiled_gradients_equal(*arguments, expected)


TOKENS, WIDTH = 37, 8  # tokens that no block divides
Q, K, V, FACTOR = (sharded.normal(seed, 2, 1, TOKENS, WIDTH) for seed in range(4))
BIAS = sharded.normal(4, 1, TOKENS)
DOCUMENTS = np.tile(np.arange(TOKENS, dtype=np.int32) // 15, (2, 1))
RATE = 0.3


def attend_plainly(q, k, v, bias):
    """With JAX's own mask of all pairs of tokens."""
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = (distance >= 0) & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :])
    logits = (
        jnp.einsum("bhtk,bhsk->bhts", q, k) * np.float32(1 / np.sqrt(WIDTH)) + bias[:, np.maximum(distance, 0)][None]
    )
    keep = jax.random.bernoulli(jax.random.key(3), 1 - RATE, (TOKENS, TOKENS))[None, None]
    weights = jnp.where(keep, jax.nn.softmax(jnp.where(seen, logits, -1e30)), 0) / np.float32(1 - RATE)
    return jnp.einsum("bhts,bhsk->bhtk", weights, v)


def attend_in_blocks(block):
    keys = jnp.tile(KEYS, (2, 1, 1))
    return lambda q, k, v, bias: blockwise_attention.attend_in_blocks(q, k, v, Mask(bias, DOCUMENTS, keys), block, RATE)


def differentiate(attend):
    """Returns the function that gives the sum of weighted values, and its gradients in q, k, v and the bias."""
    return jax.value_and_grad(lambda *args: (attend(*args) * FACTOR).sum(), argnums=(0, 1, 2, 3))


@functools.cache
def compute_plainly():
    return exact.run(differentiate(attend_plainly), Q, K, V, BIAS).outputs


@pytest.mark.parametrize("block", [16, 32, 37])
def test_blocks_pad_a_context_that_they_do_not_divide(block):
    found = exact.run(differentiate(attend_in_blocks(block)), Q, K, V, BIAS).outputs
    assert asserts.worst_relative(found, compute_plainly()) < 1e-13


def test_compiled_blocks_have_the_numbers_of_plain_attention():
    found = jax.jit(differentiate(attend_in_blocks(16)))(Q, K, V, BIAS)
    assert asserts.worst_relative(found, compute_plainly()) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(1, 1), (31, 31), (64, 64), (100, 50), (1024, 64), (1031, 64), (1535, 64), (2048, 128), (2049, 128)],
)
def test_block_is_never_small_in_a_long_context(tokens, size):
    assert blockwise_attention.block_size(tokens) == size


def temporary_bytes(tokens, block):
    """Returns the temporary memory of attention's gradient; block 0 means all pairs at once."""

    def total(q):
        if block:
            return blockwise_attention.attend_in_blocks(q, q, q, Mask(), block).sum()
        seen = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
        logits = jnp.where(seen, jnp.einsum("bhtk,bhsk->bhts", q, q), -1e30)
        return jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(logits), q).sum()

    q = jax.ShapeDtypeStruct((1, 1, tokens, 16), jnp.float32)
    return jax.jit(jax.grad(total)).lower(q).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_blocks_is_linear_in_the_context():
    blocks, plain = (functools.partial(temporary_bytes, block=block) for block in (128, 0))
    assert blocks(8192) <= 2.2 * blocks(4096)
    assert plain(8192) > 2.2 * plain(4096)
    assert blocks(4096) < plain(4096) / 10


def computed_pairs(window, tokens=64, block=8):
    """Returns the pairs of blocks computed forward, and for the gradient of values: NaNs show which ones."""
    blocks = tokens // block
    ones = np.ones((blocks, 1, tokens, 2), np.float32)
    poisoned = ones.copy()
    for row in range(blocks):
        poisoned[row, :, row * block : (row + 1) * block] = np.nan

    def attend(v):
        return blockwise_attention.attend_in_blocks(ones, ones, v, Mask(window=window), block)

    values, d_values = exact.run(lambda v: (attend(v), jax.vjp(attend, ones)[1](v)[0]), poisoned).outputs
    return [int(np.isnan(x).any((1, 3)).reshape(blocks, blocks, block).any(-1).sum()) for x in (values, d_values)]


def test_blocks_outside_a_window_are_not_computed():
    assert computed_pairs(None) == [8 * 9 / 2] * 2
    assert computed_pairs(1) == [8] * 2
    assert computed_pairs(9) == [8 + 7] * 2  # the first token of a block sees the first of the block before
    assert computed_pairs(10) == [8 + 7 + 6] * 2
    assert computed_pairs(64) == [8 * 9 / 2] * 2


def test_blocks_above_the_diagonal_are_not_computed():
    """NaNs there would reach the sums through weights of zero."""
    block, late = 8, slice(24, 32)
    q, k, v = (np.array(x[:, :, :32]) for x in (Q, K, V))

    def attend(q, k, v):
        return blockwise_attention.attend_in_blocks(q, k, v, Mask(), block)

    def differentiate_values(q, k, v, d_values):
        return jax.vjp(attend, q, k, v)[1](d_values)[2]

    v_late = v.copy()
    v_late[:, :, late] = np.nan
    values = exact.run(attend, q, k, v_late).outputs
    assert np.isfinite(values[:, :, :24]).all()
    assert np.isnan(values[:, :, late]).all()

    d_values = np.ones_like(v)
    d_values[:, :, :block] = np.nan
    dv = exact.run(differentiate_values, q, k, v, d_values).outputs
    assert np.isfinite(dv[:, :, block:]).all()
    assert np.isnan(dv[:, :, :block]).all()
