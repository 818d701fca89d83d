"""Attention over a split context: the numbers of all pairs of tokens on one device, both ways, and broken twins.

All in float64, but for compiled rings of two devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.kernels.attention import AttentionOptions
from shardformer.parallel import context, ring_attention
from shardformer.parallel.ring_attention import Gathered, Ring
from tests import asserts, sharded

TOKENS, WIDTH, RATE, CAP = 32, 4, 0.3, 2.0
Q, FACTOR = (sharded.normal(seed, 2, 4, TOKENS, WIDTH) for seed in (0, 1))
K, V = (sharded.normal(seed, 2, 2, TOKENS, WIDTH) for seed in (2, 3))  # each head serves two
BIAS = sharded.normal(4, 4, TOKENS)
DOCUMENTS = np.cumsum(np.random.RandomState(5).rand(2, TOKENS) < 0.15, axis=1).astype(np.int32)
KEYS = jax.random.split(jax.random.key(3), (2, 4))
KEY_DATA = jax.random.key_data(KEYS)
CASES = {
    "plain": {},
    "window": {"window": 6},  # 2 more than a block: its first token is the last one of a block
    "everything": {"documents": DOCUMENTS, "bias": True, "dropout": True, "window": 19, "cap": CAP},
}


def attend_plainly(q, k, v, bias, documents=None, dropout=False, window=TOKENS, cap=None):
    """Attention of complete rows as its definition says it, with JAX's own dropout masks."""
    k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = ((distance >= 0) & (distance < window))[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    logits = jnp.einsum("bhtk,bhsk->bhts", q, k) / np.float32(np.sqrt(WIDTH))
    logits = logits if bias is None else logits + bias[:, np.maximum(distance, 0)][None]
    logits = logits if cap is None else np.float32(cap) * jnp.tanh(logits / np.float32(cap))
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30))
    if dropout:
        draw = functools.partial(jax.random.bernoulli, p=1 - RATE, shape=(TOKENS, TOKENS))
        weights = jnp.where(jax.vmap(jax.vmap(lambda key: draw(key)))(KEYS), weights, 0) / np.float32(1 - RATE)
    return jnp.einsum("bhts,bhsk->bhtk", weights, v)


class Masks:
    """Dropout with given keys."""

    rate = RATE

    def at(self, site):
        return self

    def head_keys(self, heads):
        return KEY_DATA


def in_context(cp, method):
    """Returns attention of complete rows, of which each of cp devices computes its tokens."""
    mesh = Mesh(np.array(jax.devices()[:cp]), ("cp",))

    def attend(q, k, v, bias, documents=None, dropout=False, window=None, cap=None):
        def body(q, k, v, bias):
            local = (method.take_tokens(jnp.swapaxes(x, 1, 2)) for x in (q, k, v))
            bias = None if bias is None else lax.pcast(bias, "cp", to="varying")
            options = AttentionOptions(None, None, cap, bias, documents, window, Masks() if dropout else None)
            return jnp.swapaxes(method.attend(*local, options), 1, 2)

        values = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(None, None, "cp"))(q, k, v, bias)
        return in_order(values, cp)

    return attend


def in_order(x, cp):
    """Undoes the zig-zag: shard s holds chunk s and chunk 2 cp - 1 - s."""
    chunks = np.arange(TOKENS).reshape(2 * cp, -1)
    held = np.concatenate([chunks[n] for shard in range(cp) for n in (shard, 2 * cp - 1 - shard)])
    return x[:, :, np.argsort(held)]


def run_exactly(function):
    return lambda *arguments: exact.run(function, *arguments).outputs


def measure(attend, bias=False, run=run_exactly, **options):
    """Returns the sum of weighted values and its gradients in q, k, v and the bias."""

    def total(q, k, v, bias):
        return (attend(q, k, v, bias, **options) * FACTOR).sum()

    return run(jax.value_and_grad(total, (0, 1, 2, 3)))(Q, K, V, BIAS if bias else None)


@functools.cache
def expected(name):
    return measure(attend_plainly, **CASES[name])


def distance(cp, method, name, run=run_exactly):
    """Returns the worst relative difference of the sum and the gradients from those of one device."""
    return asserts.worst_relative(measure(in_context(cp, method), run=run, **CASES[name]), expected(name))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", [Ring(block=4), Gathered(block=4)])
def test_split_context_gives_the_numbers_of_one_device(method, cp):
    assert distance(cp, method, "everything") < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("method", [Ring(block=4), Gathered(block=4)])
def test_compiled_split_context_gives_the_numbers_of_one_device(method):
    assert distance(2, method, "everything", run=jax.jit) < 2e-6


@pytest.mark.parametrize("method", [Ring(block=4), Gathered(block=4)])
def test_window_that_ends_with_a_block_gives_the_same_numbers(method):
    assert distance(2, method, "window") < 1e-13


def test_eight_shards_give_the_numbers_of_one_device():
    assert distance(8, Ring(block=2), "everything") < 1e-13


def twin_of_a_missed_block(numbers):
    return lambda step, sizes: numbers(step, sizes) if step != 1 else (numbers(1, sizes)[0], numbers(1, sizes)[1] + 99)


def twin_of_a_block_counted_twice(numbers):
    return lambda step, sizes: numbers(step, sizes) if step != 1 else (numbers(1, sizes)[0], numbers(0, sizes)[1])


def twin_of_an_undone_zigzag(numbers):
    """On one device, blocks have the numbers of a plain order."""

    def undone(step, sizes):
        local, visiting = numbers(step, sizes)
        plain = jnp.arange(local.size)
        return jnp.where(lax.axis_index("cp") == 1, plain, local), visiting

    return undone


@pytest.mark.parametrize(
    "twin", [twin_of_a_missed_block, twin_of_a_block_counted_twice, twin_of_an_undone_zigzag], ids=lambda f: f.__name__
)
def test_broken_ring_is_detected(broken, twin):
    broken(ring_attention, "indices_in_ring", twin(ring_attention.indices_in_ring))
    assert distance(2, Ring(block=4), "plain") > 1e-3


def test_gradients_left_on_other_shards_are_detected(broken):
    def take(x_BgTK):
        return context.take(x_BgTK.swapaxes(1, 2), lax.axis_index("cp"), 2).swapaxes(1, 2)

    broken(ring_attention, "_scatter", take)
    assert distance(2, Gathered(block=4), "plain") > 1e-3
