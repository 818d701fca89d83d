"""The product with a hand-written backward pass against the one that JAX derives."""

import jax
import jax.numpy as jnp
import pytest

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
