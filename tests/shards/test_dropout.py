"""Dropout: the right share, and masks that depend only on the key and on global indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.shards import Dropout
from tests import sharded, shared
from tests.surroundings import before_call

KEY = jax.random.key(3)
EXAMPLES = jnp.arange(8)
ONES = np.ones((8, 16, 32), np.float32)
HEADS = np.ones((8, 8, 16, 16), np.float32)
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


def masks(shape, rate=0.5, run=sharded.on_mesh):
    """Both kinds of masks of a batch of 8 examples on a mesh."""

    def body(x_BTD, x_BhTS, data):
        rows = x_BTD.shape[0]
        dropout = Dropout(rate, jax.random.wrap_key_data(data), collectives.index("dp") * rows + jnp.arange(rows))
        return dropout.at(2)(x_BTD), dropout.at(2).heads(x_BhTS)

    specs = (P("dp"), P("dp", "mp"))
    return run(body, shape, (*specs, P()), specs)(ONES, HEADS, jax.random.key_data(KEY))


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_dropout_keeps_and_scales_the_right_share(rate):
    for kept in masks((1, 1), rate):
        np.testing.assert_allclose(np.unique(kept), [0, 1 / np.float64(np.float32(1 - rate))], rtol=1e-14)
        assert abs(float((kept > 0).mean()) - (1 - rate)) < 0.03
        assert abs(float(kept.mean()) - 1) < 0.06


def test_masks_are_the_same_on_every_mesh():
    expected = masks((1, 1))
    for shape in MESHES:
        for got, whole in zip(masks(shape), expected, strict=True):
            np.testing.assert_array_equal(got, whole)


def test_compiled_masks_are_the_exact_ones():
    compiled = masks((2, 4), run=sharded.compile_on_mesh)
    for got, whole in zip(compiled, masks((1, 1)), strict=True):
        np.testing.assert_array_equal(got, whole)  # 1 / (1 - 0.5) is exact in float32


def test_key_without_the_example_repeats_masks_over_dp():
    """The seed's successors gave one key to every shard: a mask's shape is then its only index."""

    def body(x_BTD, data):
        return x_BTD * jax.random.bernoulli(jax.random.wrap_key_data(data), 0.5, x_BTD.shape).astype(jnp.float32)

    repeated = sharded.on_mesh(body, (4, 2), (P("dp"), P()), P("dp"))(ONES, jax.random.key_data(KEY))
    assert same(repeated[0:2], repeated[2:4])
    ours = masks((4, 2))[0]
    assert not same(ours[0:2], ours[2:4])


def same(a, b):
    return bool((np.asarray(a) == np.asarray(b)).all())


def test_every_example_and_head_has_its_own_mask():
    by_example, by_head = masks((2, 4))
    assert not any(same(by_example[i], by_example[j]) for i in range(8) for j in range(i))
    assert not any(same(by_head[0, i], by_head[0, j]) for i in range(8) for j in range(i))
    assert not any(same(by_head[i, 0], by_head[j, 0]) for i in range(8) for j in range(i))


def test_masks_of_attention_may_have_more_keys_than_queries():
    def drop(ones_BhTS, data):
        return Dropout(0.5, jax.random.wrap_key_data(data), jnp.arange(1)).heads(ones_BhTS)

    ones = np.ones((1, 2, 3, 5), np.float32)
    got = sharded.on_mesh(drop, (1, 2), (P(None, "mp"), P()), P(None, "mp"))(ones, jax.random.key_data(KEY))
    for head in range(2):
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), head)
        np.testing.assert_array_equal(got[0, head] > 0, jax.random.bernoulli(key, 0.5, (3, 5)))


def test_every_layer_site_and_step_has_its_own_mask():
    dropout = Dropout(0.5, KEY, EXAMPLES)

    def of(dropout):
        return np.asarray(dropout(ONES))

    keys = [dropout.at(layer).at(site) for layer in range(3) for site in range(3)] + [dropout.at(0), dropout.at(1)]
    keys.append(Dropout(0.5, jax.random.key(4), EXAMPLES))
    masks = [of(each) for each in keys]
    assert not any(same(masks[i], masks[j]) for i in range(len(masks)) for j in range(i))
    assert same(of(dropout.at(1).at(2)), of(dropout.at(1).at(2)))


@pytest.mark.parametrize(
    ("block", "sites"), [("parallel", [0, 1]), ("parallel_two_norms", [0, 1]), ("sequential", [0, 1, 2])]
)
def test_sites_of_dropout_keep_their_numbers(monkeypatch, block, sites):
    """A resumed run draws the masks of the version that began it: 0 after the embedding, 1 + i in layer i."""
    numbers = []
    before_call(monkeypatch, Dropout, "at", lambda dropout, index: numbers.append(index))
    config = shared.tiny(mesh="1x1", layers=2, block=block, dropout=0.1, scan=False)
    model = Model.on(config, mesh.make(config))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    jax.eval_shape(model.evaluate, model.shapes, shared.batch(), key)
    assert numbers == [0, 1, *sites, 2, *sites]


def test_a_dropped_value_has_no_gradient():
    dropout = Dropout(0.5, KEY, EXAMPLES)
    gradient = jax.grad(lambda x: dropout(x).sum())(ONES)
    np.testing.assert_array_equal(gradient, dropout(ONES))
