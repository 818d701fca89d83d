"""Gradients of gathered matrices, summed over rings while they are computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.kernels import ring_product, ring_scatter
from tests import asserts, sharded

X, DY = sharded.normal(0, 8, 5, 32), sharded.normal(1, 8, 5, 48)  # 5 tokens on each place of dp
SUM = np.einsum("dni,dno->io", X, DY)


def scattered(stages, dimension, dtype="float32"):
    """Returns the slices of all places, joined."""
    ring = ring_product.Ring(dimension, stages, ("dp",), dtype)

    def body(x, dy):
        return ring_product.scatter_product(x[0], dy[0], ring)

    out = P("dp") if dimension == 0 else P(None, "dp")
    return sharded.on_mesh(body, (8, 1), (P("dp"), P("dp")), out)(X, DY)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("stages", [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_places_keep_their_slices_of_the_sum(stages, dimension):
    np.testing.assert_allclose(scattered(stages, dimension), SUM, rtol=1e-5, atol=1e-5)


def test_ring_that_turns_back_leaves_other_slices(monkeypatch):
    """The twin: a wrong place in the group."""
    right = ring_scatter._place_in_group
    monkeypatch.setattr(ring_scatter, "_place_in_group", lambda axis, groups: len(groups[0]) - 1 - right(axis, groups))
    assert asserts.relative(np.asarray(scattered((8,), 0)), SUM) > 0.5


def test_bfloat16_sums_are_within_half_a_percent():
    assert 1e-5 < asserts.relative(np.asarray(scattered((2, 4), 0, "bfloat16")), SUM) < 5e-3


def gradients(multiply):
    """Returns the gradients of x and of the parts of w, where `multiply(x, part)` is the product."""

    def body(x, part):
        def loss(x, part):
            return jnp.square(multiply(x, part)).sum()

        return jax.grad(loss, (0, 1))(x, part)

    w = sharded.normal(2, 32, 48)
    return sharded.on_mesh(body, (8, 1), (P("dp"), P("dp")), (P("dp"), P("dp")))(X, w)


def gather(part):
    return lax.all_gather(part, "dp", axis=0, tiled=True)


def multiply(x, part):
    ring = ring_product.Ring(0, (2, 4), ("dp",), "float32")
    return ring_product.multiply(x, ring_product.GatheredMatrix(gather(part), part, ring), "float32")


def multiply_as_array(x, part):
    ring = ring_product.Ring(0, (2, 4), ("dp",), "float32")
    return x @ ring_product.GatheredMatrix(gather(part), part, ring).as_array()


@pytest.mark.parametrize("product", [multiply, multiply_as_array])
def test_gathered_matrix_has_the_gradients_of_a_gather(product):
    for ours, plain in zip(gradients(product), gradients(lambda x, part: x @ gather(part)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "stages", "dimension", "fitting"),
    [
        ((4096, 16384), (4, 4), 0, True),
        ((4096, 16384), (4, 4), 1, True),
        ((4096, 50400), (4, 4), 0, True),  # the last 112 columns fill no tile: 0.2% are lost
        ((768, 768), (4,), 0, False),  # slices of 192 rows
        ((4096, 4096), (32,), 0, False),  # the ring is too long
        ((4096,), (4, 4), 0, False),
    ],
)
def test_slices_fill_tiles(shape, stages, dimension, fitting):
    assert ring_product.fits(shape, ring_product.Ring(dimension, stages, ("dp",), "bfloat16")) == fitting


def test_full_gradient_is_never_made():
    ring = ring_product.Ring(0, (2, 4), ("dp",), "float32")
    text = sharded.on_mesh(
        lambda x, dy: ring_product.scatter_product(x[0], dy[0], ring), (8, 1), (P("dp"), P("dp")), P("dp")
    )
    assert not re.search(r"dot_general.*-> tensor<32x48xf32>", text.lower(X, DY).as_text())
