"""The product with a hand-written backward pass against the one that JAX derives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels import gradient_pieces
from shardformer.kernels import linear as linear_module
from shardformer.kernels.linear import linear
from tests import asserts, sharded

X, W, DY = sharded.normal(0, 2, 5, 8), sharded.normal(1, 8, 12), sharded.normal(2, 2, 5, 12)


def value_and_gradients(product, dtype):
    def weighted(x, w):
        return (product(x, w).astype(jnp.float32) * DY).sum()

    return jax.jit(jax.value_and_grad(weighted, (0, 1)))(X.astype(dtype), W.astype(dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_linear_equals_the_plain_product(dtype, tolerance):
    (value, grads), (expected, expected_grads) = (value_and_gradients(f, dtype) for f in (linear, jnp.matmul))
    assert asserts.relative(value, expected) <= tolerance
    for got, grad in zip(grads, expected_grads, strict=True):
        assert got.dtype == grad.dtype == dtype
        assert asserts.relative(got, grad) <= tolerance


@pytest.mark.parametrize(("columns", "products"), [(256, ["64x256xbf16"]), (512, ["64x256xbf16"] * 2)])
def test_a_wide_gradient_on_a_tpu_is_several_products(monkeypatch, columns, products):
    monkeypatch.setattr(gradient_pieces, "ELEMENTS", 64 * 256)
    x, w = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((64, columns), jnp.bfloat16)

    def backward(x, w):
        y, pull = jax.vjp(linear, x, w)
        return pull(y)[1]

    text = jax.jit(backward).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r"dot_general.*-> tensor<(64x\w+)>", text) == products


def test_products_in_pieces_are_the_product(monkeypatch):
    monkeypatch.setattr(gradient_pieces, "ELEMENTS", 1 << 12)
    x, dy = sharded.normal(0, 6, 32), sharded.normal(1, 6, 512)
    np.testing.assert_allclose(linear_module._product_in_pieces(x, dy), x.T @ dy, rtol=1e-5, atol=1e-5)
