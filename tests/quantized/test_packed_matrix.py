"""4-bit codes, two in a byte, and products that never store the float matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.quantized import code_products, packed_matrix
from shardformer.quantized.packed_matrix import PackedMatrix
from shardformer.quantized.part_keys import group_size
from tests import asserts

ROWS, INPUTS, OUTPUTS = 3, 640, 1600  # tiles of two groups


def matrix(inputs=INPUTS, outputs=OUTPUTS):
    return np.random.RandomState(0).normal(size=(inputs, outputs)).astype(np.float32)


def activations(outputs=INPUTS):
    return np.random.RandomState(1).normal(size=(1, ROWS, outputs)).astype(np.float32)


def quantize(form):
    if form == "int4":
        codes, scales = jax.jit(packed_matrix.quantize_int4)(matrix())
        return PackedMatrix(codes, scales.astype(jnp.float32), packed_matrix.INT4_LEVELS)
    codes, scales, blocks = jax.jit(packed_matrix.quantize_nf4)(matrix())
    floats = packed_matrix.dequantize_scales(scales, blocks, (0, 0), INPUTS // 64)
    return PackedMatrix(codes, floats, packed_matrix.NF4_LEVELS)


def dequantize(w: PackedMatrix, levels):
    """Returns the float64 matrix, by NumPy."""
    codes = np.asarray(w.codes)
    values = np.empty((INPUTS, OUTPUTS))
    values[::2], values[1::2] = np.array(levels)[codes // 16], np.array(levels)[codes % 16]
    return values * np.repeat(np.asarray(w.scales, np.float64), 64, axis=0)


def test_group_is_the_largest_even_divisor():
    assert [group_size(inputs) for inputs in (768, 80, 24, 134)] == [64, 40, 24, 2]


def test_int4_codes_equal_numpy():
    w = matrix(128, 6)
    w[:64, 2] = 0
    groups = w.reshape(2, 64, 6)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1, keepdims=True), 1)
    scales = (largest / -8).astype(jnp.bfloat16).astype(np.float32)
    steps = groups * (1 / np.where(scales == 0, np.float32(1), scales))
    expected = (np.clip(np.rint(steps), -8, 7) + 8).astype(np.uint8).reshape(128, 6)
    codes, got = packed_matrix.quantize_int4(jnp.asarray(w))
    np.testing.assert_array_equal(np.asarray(packed_matrix.unpack(codes)), expected)
    np.testing.assert_array_equal(np.asarray(got, np.float32), scales[:, 0])
    assert codes.nbytes * 2 == w.size
    assert (np.asarray(packed_matrix.unpack(packed_matrix.quantize_int4(jnp.asarray(w + 0.3))[0])) != expected).any()


def differentiate(x, d, w):
    """Returns the product, and the gradient in x of its sum weighted by d."""
    return packed_matrix.multiply(x, w), jax.vjp(packed_matrix.multiply, x, w)[1](d)[0]


@pytest.mark.parametrize(
    ("form", "levels", "few"),
    [("int4", range(-8, 8), 16), ("nf4", packed_matrix.NF4_LEVELS, 16), ("nf4", packed_matrix.NF4_LEVELS, 1)],
)
def test_product_and_gradient_equal_the_dequantised_matrix(form, levels, few, monkeypatch):
    monkeypatch.setattr(packed_matrix, "FEW_ROWS", few)
    w, x, d = quantize(form), activations(), activations(OUTPUTS)
    dense = dequantize(w, levels)
    y, gradient = exact.run(differentiate, x, d, w).outputs
    assert asserts.relative(y, x @ dense) < 1e-14
    assert asserts.relative(gradient, d @ dense.T) < 1e-14
    wrong, _ = exact.run(differentiate, x, d, PackedMatrix(w.codes, jnp.flip(w.scales, 0), w.levels)).outputs
    assert np.abs(wrong - x @ dense).max() > 0.1


@pytest.mark.parametrize("few", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_product_and_gradient_are_the_exact_ones(few, monkeypatch):
    monkeypatch.setattr(packed_matrix, "FEW_ROWS", few)
    w, x, d = quantize("nf4"), activations(), activations(OUTPUTS)
    asserts.assert_compiled_is_exact(lambda *args: differentiate(*args), x, d, w)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (40, 64), (40, 24)])
def test_matrix_smaller_than_a_tile(rows, inputs):
    codes, scales = packed_matrix.quantize_int4(jnp.asarray(matrix(inputs, 8)))
    w = PackedMatrix(codes, scales.astype(jnp.float32), packed_matrix.INT4_LEVELS)
    x, d, dense = np.ones((1, rows, inputs), np.float32), activations(8)[:, :1], np.float64(w.astype(jnp.float32))
    d = np.repeat(d, rows, 1)
    y, gradient = exact.run(differentiate, x, d, w).outputs
    assert asserts.relative(y, x @ dense) < 1e-14
    assert asserts.relative(gradient, d @ dense.T) < 1e-14


def large_floats(program: str) -> list[str]:
    """Returns the shapes of float arrays in a compiled program that have half as many elements as the matrix."""
    shapes = {
        word.partition("[")[2].partition("]")[0] for word in program.split() if word.startswith(("f32[", "bf16["))
    }
    return [shape for shape in shapes if shape and np.prod([int(n) for n in shape.split(",")]) > INPUTS * OUTPUTS / 2]


@pytest.mark.parametrize("few", [1, 16])
def test_compiled_product_and_gradient_have_no_float_matrix(few, monkeypatch):
    monkeypatch.setattr(packed_matrix, "FEW_ROWS", few)
    w = jax.eval_shape(lambda: quantize("nf4"))
    x = jax.ShapeDtypeStruct((1, ROWS, INPUTS), jnp.float32)

    def both(multiply):
        return lambda x, w: jax.value_and_grad(lambda x: multiply(x, w).sum())(x)

    tiled = jax.jit(both(packed_matrix.multiply)).lower(x, w).compile()
    assert not large_floats(tiled.as_text())
    assert tiled.memory_analysis().temp_size_in_bytes < 4 * INPUTS * OUTPUTS
    at_once = jax.jit(both(lambda x, w: x @ w.astype(x.dtype))).lower(x, w).compile()
    assert large_floats(at_once.as_text())


def test_tile_has_full_groups(monkeypatch):
    monkeypatch.setattr(code_products, "TILE_ROWS", 1)
    assert packed_matrix._bytes_of_tile(quantize("int4")) == 64  # 163 inputs would be a megabyte


@pytest.mark.parametrize(("form", "levels"), [("int4", range(-8, 8)), ("nf4", packed_matrix.NF4_LEVELS)])
def test_products_of_accelerators_equal_the_dequantised_matrix(form, levels):
    """Their compilers convert inside of the product; here a CPU runs them."""
    w = quantize(form)
    dense = dequantize(w, levels)
    x, d = activations()[0], activations(OUTPUTS)[0]
    for multiply, factor, expected in (
        (packed_matrix._multiply_at_once, x, x @ dense),
        (packed_matrix._multiply_transposed, d, d @ dense.T),
        (packed_matrix._multiply_transposed_on_tpu, d, d @ dense.T),
    ):
        got = exact.run(multiply, factor, w).outputs
        assert asserts.relative(got, expected) < 1e-14
        assert np.abs(got[:, ::-1] - expected).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", [512, 640])  # full groups of lanes, and half of one more
def test_inputs_are_split_and_joined_by_products(inputs, dtype):
    x = jnp.asarray(activations(inputs)[0], dtype)
    even, odd = jax.jit(packed_matrix.split_by_products)(x)
    np.testing.assert_array_equal(even, x[:, ::2])
    np.testing.assert_array_equal(odd, x[:, 1::2])
    join = jax.jit(packed_matrix.join_by_products)
    np.testing.assert_array_equal(join(even, odd), x)
    assert (np.asarray(join(odd, even)) != x).any()


@pytest.mark.parametrize(("platform", "products", "barriers"), [("tpu", 3, 3), ("cuda", 0, 0)])
def test_only_a_tpu_splits_and_joins_by_products(platform, products, barriers):
    codes, scales = jax.eval_shape(packed_matrix.quantize_int4, jax.ShapeDtypeStruct((256, 8), jnp.float32))
    w = PackedMatrix(codes, jax.ShapeDtypeStruct(scales.shape, jnp.float32), packed_matrix.INT4_LEVELS)
    x, d = (jax.ShapeDtypeStruct((1, ROWS, size), jnp.float32) for size in (256, 8))
    program = jax.jit(lambda *args: differentiate(*args)).trace(x, d, w).lower(lowering_platforms=(platform,))
    with_codes = 2 * 2  # forward and backward, with the high and the low codes
    assert program.as_text().count("stablehlo.dot_general") == with_codes + products
    assert program.as_text().count("stablehlo.optimization_barrier") == barriers  # without, it stores float matrices
    assert len(program.as_text()) < 20_000  # without constant matrices
