"""Heads as an axis: slices and a reshape give the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels import split_heads
from tests import sharded


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 128), (1, 256), (4, 64)])
def test_slices_are_the_heads_of_a_reshape(heads, head_dim):
    x_BTd = sharded.normal(0, 2, 5, heads * head_dim)
    np.testing.assert_array_equal(split_heads.stack_slices(x_BTd, heads), x_BTd.reshape(2, 5, heads, head_dim))


@pytest.mark.parametrize(("head_dim", "slices"), [(128, 3), (64, 0)])
def test_only_heads_of_whole_tiles_are_sliced(head_dim, slices):
    program = jax.make_jaxpr(lambda x: split_heads.stack_slices(x, 3))(jnp.zeros((2, 5, 3 * head_dim)))
    (split,) = [e.params["sizes"] for e in program.jaxpr.eqns if e.primitive.name == "split"] or [()]
    assert len(split) == slices


@pytest.mark.parametrize(("platform", "slices"), [("tpu", 3), ("cpu", 0), ("cuda", 0)])
def test_only_a_tpu_takes_slices(platform, slices):
    traced = jax.jit(split_heads.split_heads, static_argnums=1).trace(jnp.zeros((2, 5, 3 * 128)), 3)
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.slice") == slices


def test_gradient_is_that_of_a_reshape():
    x_BTd, weights_BThK = sharded.normal(0, 2, 5, 24), sharded.normal(1, 2, 5, 3, 8)
    got = jax.grad(lambda x: (split_heads.split_heads(x, 3) * weights_BThK).sum())(x_BTd)
    np.testing.assert_array_equal(got, weights_BThK.reshape(2, 5, 24))
