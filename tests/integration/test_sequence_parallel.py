"""Activations split over mp by tokens: the numbers are in test_parity.py; here masks, memory, the wire and decoding."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives, inference
from shardformer.analysis import temporaries
from shardformer.analysis.program_collectives import parse_collectives
from shardformer.kernels.threefry import keep_mask
from shardformer.layout import mesh, resolve
from shardformer.model import Decoder, Model
from shardformer.shards import Dropout, dropout, transformer
from tests import meshes, sharded, shared

KEY = jax.random.key_data(jax.random.key(3))
ONES = np.ones((8, 16, 32), np.float32)


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_masks_are_bitwise_those_of_whole_activations(shape):
    def masks(split):
        def body(x, data):
            rows = x.shape[0]
            examples = collectives.index("dp") * rows + jnp.arange(rows)
            return Dropout(0.3, jax.random.wrap_key_data(data), examples, split).at(2)(x)

        spec = P("dp", "mp") if split else P("dp")
        return np.asarray(sharded.on_mesh(body, shape, (spec, P()), spec)(ONES, KEY))

    np.testing.assert_array_equal(masks(True), masks(False))


def model(name="2x4", **overrides):
    config = shared.tiny(mesh=name, sequence_parallel=True, **overrides)
    return Model.on(config, mesh.make(config))


def loss(**overrides) -> float:
    return float(meshes.compute_gradients(shared.tiny(mesh="2x4", **overrides)).loss)


def test_masks_by_local_position_are_seen(broken):
    expected = loss(dropout=0.2)
    assert loss(dropout=0.2, sequence_parallel=True) == pytest.approx(expected, rel=meshes.EXACT)

    def local(keys, rate, row_T, column_S, columns):
        return keep_mask(keys, rate, jnp.arange(len(row_T)), column_S, columns)

    broken(dropout, "keep_mask", local)
    assert abs(loss(dropout=0.2, sequence_parallel=True) / expected - 1) > 1e-4


def test_tokens_in_another_order_are_seen(broken):
    """The twin of a scatter whose parts land on the wrong shards."""
    expected = loss()
    broken(
        collectives, "reduce",
        lambda x, split=False: lax.psum_scatter(x[:, ::-1], "mp", scatter_dimension=1, tiled=True)
        if split else lax.psum(x, "mp"),
    )  # fmt: skip
    assert abs(loss(sequence_parallel=True) / expected - 1) > 1e-4


def sizes_sent_in_loops(m):
    lowered = jax.jit(m.loss_and_grad).lower(m.abstract, shared.batch(), KEY)
    return {math.prod(c.shape) for c in parse_collectives(lowered.compile().as_text()) if c.in_loop}


@pytest.mark.slow
def test_gradients_of_norms_are_summed_after_the_loop(broken):
    assert sizes_sent_in_loops(model()) == {4 * 16 * 32, 4 * 4 * 32}  # all tokens of four rows, and a shard's own
    broken(transformer, "_vary_late_parameters", lambda params: params)
    assert 32 in sizes_sent_in_loops(model())


@functools.cache
def temporary(split):
    """(compiled, estimated) bytes of a step that keeps little more than the activations between its layers."""
    config = shared.tiny(mesh="1x8", layers=12, seq=128, d_model=64, remat="full", sequence_parallel=split)
    m = Model.on(config, mesh.make(config))
    batch = {name: jax.ShapeDtypeStruct((8, 128), np.int32) for name in ("tokens", "targets")}
    compiled = jax.jit(m.loss_and_grad).lower(m.abstract, batch, KEY).compile()
    return compiled.memory_analysis().temp_size_in_bytes, temporaries.estimate_temporaries(resolve(config))


@pytest.mark.slow
def test_activations_between_layers_are_split_over_mp():
    stream = 12 * 8 * 128 * 64 * 4  # of every layer: rows, tokens, width
    compiled, estimated = (whole - split for whole, split in zip(temporary(False), temporary(True), strict=True))
    assert compiled > 0.8 * stream * 7 / 8
    assert estimated > 0.8 * stream * 7 / 8


@pytest.mark.nightly
def test_decoding_and_scoring_take_any_number_of_tokens():
    greedy = inference.Sampling(tokens=5, temperature=0)
    params = shared.initial_state(mesh="2x4").params
    models = model(), shared.trainer(mesh="2x4").model
    texts = [inference.Generator(m).generate(params, [1, 2, 3], greedy) for m in models]
    np.testing.assert_array_equal(*texts)
    tokens = shared.batch()["tokens"][:, :7]
    assert Decoder(model()).logits(params, tokens).shape == (8, 7, 64)


def test_an_evaluation_is_that_of_whole_activations():
    meshes.assert_equal_sums(shared.tiny(mesh="2x4", sequence_parallel=True))
