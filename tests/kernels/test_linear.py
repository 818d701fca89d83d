"""The product with a hand-written backward pass against the one that JAX derives, its pieces, and heads as an axis."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.kernels import linear as linear_module
from shardformer.kernels.linear import PIECE_ELEMENTS, linear, split_columns, split_heads, stack_slices
from tests import asserts, sharded
from tests.surroundings import change_pieces

X, W, DY = sharded.normal(0, 2, 5, 8), sharded.normal(1, 8, 12), sharded.normal(2, 2, 5, 12)


def differentiate(product):
    def weighted(x, w):
        return (product(x, w).astype(jnp.float32) * DY).sum()

    return jax.value_and_grad(weighted, (0, 1))


def value_and_gradients(product, dtype):
    return jax.jit(differentiate(product))(X.astype(dtype), W.astype(dtype))


def test_linear_is_exactly_the_plain_product():
    got, expected = (exact.run(differentiate(product), X, W).outputs for product in (linear, jnp.matmul))
    assert asserts.worst_relative(got, expected) < 1e-15


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_linear_equals_the_plain_product(dtype, tolerance):
    (value, grads), (expected, expected_grads) = (value_and_gradients(f, dtype) for f in (linear, jnp.matmul))
    assert asserts.relative(value, expected) <= tolerance
    for got, grad in zip(grads, expected_grads, strict=True):
        assert got.dtype == grad.dtype == dtype
        assert asserts.relative(got, grad) <= tolerance


@pytest.mark.parametrize(("columns", "products"), [(256, ["64x256xbf16"]), (512, ["64x256xbf16"] * 2)])
def test_a_wide_gradient_on_a_tpu_is_several_products(monkeypatch, columns, products):
    change_pieces(monkeypatch, 64 * 256)
    x, w = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((64, columns), jnp.bfloat16)

    def backward(x, w):
        y, pull = jax.vjp(linear, x, w)
        return pull(y)[1]

    text = jax.jit(backward).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r"dot_general.*-> tensor<(64x\w+)>", text) == products


def test_products_in_pieces_are_the_product(monkeypatch):
    change_pieces(monkeypatch, 1 << 12)
    x, dy = sharded.normal(0, 6, 32), sharded.normal(1, 6, 512)
    got = exact.run(linear_module._product_in_pieces, x, dy).outputs
    assert asserts.relative(got, np.float64(x).T @ dy) < 1e-15


@pytest.mark.parametrize(
    ("rows", "columns", "widths"),
    [
        (4096, 4096, [4096]),
        (4096, 16384, [4096] * 4),
        (16384, 4096, [1024] * 4),
        (4096, 11008, [5504] * 2),
        (4096, 14336, [7168] * 2),  # thirds would end within a tile
        (4096, 50257, [50257]),
        (8, 128, [128]),
    ],
)
def test_pieces_are_whole_tiles_of_about_one_size(rows, columns, widths):
    x = jax.ShapeDtypeStruct((2, columns), jnp.float32)
    pieces = jax.eval_shape(lambda x: split_columns(x, rows * columns), x)
    assert [piece.shape[-1] for piece in pieces] == widths
    assert len(widths) == 1 or rows * widths[0] >= PIECE_ELEMENTS


def test_pieces_follow_each_other():
    x = np.arange(2 * 512).reshape(2, 512)
    pieces = split_columns(jnp.asarray(x), 3 * PIECE_ELEMENTS)
    assert len(pieces) == 2  # not three: 512 columns are four tiles
    np.testing.assert_array_equal(np.concatenate(pieces, 1), x)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 128), (1, 256), (4, 64)])
def test_slices_are_the_heads_of_a_reshape(heads, head_dim):
    x_BTd = sharded.normal(0, 2, 5, heads * head_dim)
    np.testing.assert_array_equal(stack_slices(x_BTd, heads), x_BTd.reshape(2, 5, heads, head_dim))


@pytest.mark.parametrize(("head_dim", "slices"), [(128, 3), (64, 0)])
def test_only_heads_of_whole_tiles_are_sliced(head_dim, slices):
    program = jax.make_jaxpr(lambda x: stack_slices(x, 3))(jnp.zeros((2, 5, 3 * head_dim)))
    (split,) = [e.params["sizes"] for e in program.jaxpr.eqns if e.primitive.name == "split"] or [()]
    assert len(split) == slices


@pytest.mark.parametrize(("platform", "slices"), [("tpu", 3), ("cpu", 0), ("cuda", 0)])
def test_only_a_tpu_takes_slices(platform, slices):
    traced = jax.jit(split_heads, static_argnums=1).trace(jnp.zeros((2, 5, 3 * 128)), 3)
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.slice") == slices


def test_gradient_is_that_of_a_reshape():
    x_BTd, weights_BThK = sharded.normal(0, 2, 5, 24), sharded.normal(1, 2, 5, 3, 8)
    got = jax.grad(lambda x: (split_heads(x, 3) * weights_BThK).sum())(x_BTd)
    np.testing.assert_array_equal(got, weights_BThK.reshape(2, 5, 24))
