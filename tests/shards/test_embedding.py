"""The embedding against a plain lookup in float64, values and gradients; and what it rounds to bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.shards.embedding import EmbeddingShard
from tests import asserts, sharded, shared

TABLE, POSITIONS = np.float64(sharded.normal(0, 16, 8)), np.float64(sharded.normal(1, 6, 8))
TOKENS = np.array([[0, 3, 4, 12, 3], [12, 8, 7, 1, 0]], np.int32)  # the edges of four shards of 16 rows, and repeats
WEIGHT = sharded.normal(2, 2, 5, 8)
FROM_1 = (np.arange(1, 6, dtype=np.int32))[None]


def settings(**overrides):
    return shared.tiny(d_model=8, heads=4, seq=6, vocab=13, mesh="1x4", **overrides)


def parameters(config):
    learned = {"positions": POSITIONS} if config.model.positions == "learned" else {}
    return {"embed": {"tokens": TABLE} | learned}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_lookup_equals_a_plain_one(positions):
    config = settings(positions=positions)
    got = sharded.apply(
        lambda tokens, at: EmbeddingShard(config)(tokens, at), config, parameters(config), TOKENS, FROM_1
    )
    np.testing.assert_array_equal(got, TABLE[TOKENS] + (POSITIONS[1:] if positions == "learned" else 0))


def test_each_shard_looks_up_its_part_of_split_tokens():
    config = settings(positions="learned").replace(mesh="1x2", sequence_parallel=True)
    got = sharded.apply(
        lambda tokens, at: EmbeddingShard(config)(tokens, at),
        config, parameters(config), TOKENS[:, :4], FROM_1[:, :4], mp=2, out_specs=P(None, "mp"),
    )  # fmt: skip
    np.testing.assert_array_equal(got, TABLE[TOKENS[:, :4]] + POSITIONS[1:5])


def test_gradient_goes_to_the_rows_looked_up():
    config = settings(positions="learned")

    def weighted(tokens, at):
        return (EmbeddingShard(config)(tokens, at) * WEIGHT).sum()

    grads = sharded.gradient(weighted, config, parameters(config), TOKENS, FROM_1)["embed"]
    expected = np.zeros_like(TABLE)
    np.add.at(expected, TOKENS, WEIGHT)
    np.testing.assert_allclose(grads["tokens"], expected, rtol=1e-14)
    np.testing.assert_allclose(grads["positions"][1:], WEIGHT.sum(0, np.float64), rtol=1e-14)
    np.testing.assert_array_equal(grads["positions"][0], 0)


def test_embed_scale_multiplies_tokens_only():
    config = settings(positions="learned", embed_scale=None)
    got = sharded.apply(
        lambda tokens, at: EmbeddingShard(config)(tokens, at), config, parameters(config), TOKENS, FROM_1
    )
    np.testing.assert_allclose(got, TABLE[TOKENS] * np.float32(8**0.5) + POSITIONS[1:], rtol=1e-14)


def test_embed_scale_may_be_a_factor():
    config = settings(positions="rotary", embed_scale=3.0)
    got = sharded.apply(
        lambda tokens, at: EmbeddingShard(config)(tokens, at), config, parameters(config), TOKENS, FROM_1
    )
    np.testing.assert_array_equal(got, 3 * TABLE[TOKENS])


PREVIOUS = np.float64(sharded.normal(3, 2, 16, 8))  # the tables of both distances
BEFORE = np.array([[[9, 0, 3, 4, 12], [9, 12, 8, 7, 1]], [[9, 9, 0, 3, 4], [9, 9, 12, 8, 7]]], np.int32)  # 9: no token
POSITION = FROM_1 - 1


def look_up_with_previous(tokens, at, *before):
    embed = EmbeddingShard(settings(previous_tokens=2, embed_scale=3.0))
    return embed(tokens, at, before)


def test_vectors_of_the_tokens_before_are_added():
    params = {"embed": {"tokens": TABLE, "previous": PREVIOUS}}
    expected = np.copy(TABLE[TOKENS])
    for distance in (1, 2):
        expected[:, distance:] += PREVIOUS[distance - 1][TOKENS[:, :-distance]]
    got = sharded.apply(look_up_with_previous, settings(), params, TOKENS, POSITION, *BEFORE)
    np.testing.assert_allclose(got, 3 * expected, rtol=1e-14)
    later = sharded.apply(look_up_with_previous, settings(), params, TOKENS, POSITION + 1, *BEFORE)
    assert asserts.relative(later, 3 * expected) > 0.1  # there, a token is before the first


def test_gradient_goes_to_the_rows_of_tokens_before():
    params = {"embed": {"tokens": TABLE, "previous": PREVIOUS}}

    def weighted(*args):
        return (look_up_with_previous(*args) * WEIGHT).sum()

    grads = sharded.gradient(weighted, settings(), params, TOKENS, POSITION, *BEFORE)["embed"]
    expected, weight = np.zeros_like(PREVIOUS), 3 * np.float64(WEIGHT)
    for distance in (1, 2):
        np.add.at(expected[distance - 1], TOKENS[:, :-distance], weight[:, distance:])
    np.testing.assert_allclose(grads["previous"], expected, rtol=1e-13)


def compile_lookup(**overrides):
    """Returns the vectors that real devices compute."""
    config = settings(positions="rotary", **overrides)
    tree = jax.tree.map(np.float32, parameters(config))

    def look_up(tokens, at):
        return EmbeddingShard(config)(tokens, at)

    return sharded.apply(look_up, config, tree, TOKENS, FROM_1, run=sharded.compile_on_mesh)


def test_embed_scale_is_rounded_to_the_compute_dtype():
    """As in transformers' Gemma: sqrt(8) is 2.828125 in bfloat16, and the product is rounded once more."""
    got = compile_lookup(dtype="bfloat16", embed_scale=None)
    rounded = np.float32(jnp.asarray(np.float32(TABLE[TOKENS]), jnp.bfloat16))
    np.testing.assert_array_equal(got, jnp.asarray(rounded * np.float32(2.828125), jnp.bfloat16))
    assert (np.asarray(got) != np.asarray(jnp.asarray(rounded * np.float32(8**0.5), jnp.bfloat16))).any()


def test_lookup_without_a_mask_leaks_other_rows():
    def unmasked(table, tokens):
        row = jnp.clip(tokens - collectives.offset(table.shape[0]), 0, table.shape[0] - 1)
        return collectives.reduce(table[row])

    got = sharded.on_mesh(unmasked, (1, 4), (P("mp", None), P()), P())(TABLE, TOKENS)
    assert asserts.relative(got, TABLE[TOKENS]) > 0.5


def test_bfloat16_lookup_rounds_once():
    np.testing.assert_array_equal(
        compile_lookup(dtype="bfloat16"), jnp.asarray(np.float32(TABLE[TOKENS]), jnp.bfloat16)
    )
